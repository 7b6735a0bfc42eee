"""The attempts of another user against a live run, from what its inventory says of it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from hybridflow.process.secret import VARIABLE, without_credentials
from tests.security import leaks
from tests.security.intruder import ATTEMPTS
from tests.security.inventory import Inventory

ROOT = Path(__file__).parents[2]


def attempts_of_nobody(facts: Path) -> list[list[str]]:
    """What each attempt got."""
    command = [sys.executable, "-m", "tests.security.intruder", str(facts)]
    # torch's store says for each failure with a stack
    env = {**without_credentials(), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    print(done.stderr[-1000:])
    assert done.returncode == 0, done.stderr[-3000:]
    attempts: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return attempts


def facts_of(taken: Inventory, processes: Sequence[psutil.Process], shared: Path) -> dict[str, Any]:
    """Where everything of the run is, for an intruder that has found it all out. Secrets are told
    as digests."""
    of = {
        kind: [edge for edge in taken.edges if edge.kind == kind]
        for kind in {edge.kind for edge in taken.edges}
    }
    closed = [edge.name for edge in of["folder"] if not edge.others]
    files = [edge.name for edge in (*of["file"], *of["lock"]) if edge.mode.startswith("-")]
    secret = [edge.name for edge in of["file"] if not edge.others and edge.mode.startswith("-")]
    tcp = [[edge.holder, *_host_port(edge.name)] for edge in of["tcp"]]
    keys = [
        yaml.safe_load(Path(name).read_text())["api-key"]
        for name in secret
        if name.endswith("/keys.yaml")
    ]
    digests = [hashlib.sha256(value).hexdigest() for value in leaks.values(processes, secret)]
    assert closed and secret and len(digests) >= 2, (
        "the run's secrets were not found, and nothing would be looked for"
    )
    return {
        "private": {name: name for name in closed},
        "open": [edge.name for edge in of["folder"] if edge.is_of_run],
        "files": {name: name for name in files},
        "secret_files": {name: name for name in secret},
        "locks": [edge.name for edge in of["lock"]],
        "shared_memory": [edge.name for edge in of.get("shared memory", ())],
        "pids": [process.pid for process in processes],
        "digests": digests,
        "unix": [edge.name for edge in of["unix socket"]],
        "fork_servers": [
            edge.name for edge in of.get("abstract socket", ()) if edge.holder == "fork server"
        ],
        "tcp": tcp,
        "engines": [
            f"http://{host}:{port}" for role, host, port in tcp if role == "engine server" and keys
        ],
        "engine_keys": keys,
        "job_secret": _secret(processes, VARIABLE),
        "ray_token": _secret(processes, "RAY_AUTH_TOKEN"),
        "gcs": next(f"{host}:{port}" for role, host, port in tcp if role == "Ray gcs"),
        "kinds": len(ATTEMPTS),
        "trap": str(shared / "open" / "trap"),
    }


def _secret(processes: Sequence[psutil.Process], name: str) -> str:
    """A credential that a process has in its environment, or in a file that this names."""
    for process in processes:
        held = leaks.environment(process)
        if name in held or f"{name}_PATH" in held:
            return held.get(name) or Path(held[f"{name}_PATH"]).read_text().strip()
    raise AssertionError(f"no process has {name}")


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return "127.0.0.1" if host in ("::", "0.0.0.0") else host.removeprefix("::ffff:"), int(port)
