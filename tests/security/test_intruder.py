"""Another user of the machine, uid 65534, against a live run: whatever it tries gets it nothing, the run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run
from tests.security.sockets import Listener, listeners, processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user to make the attempts"),
]
ROOT = Path(__file__).parents[2]
# Stands still in the first step until the attempts are over.
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    open(f"{folder}/live", "w").close()
    while not os.path.exists(f"{folder}/done"):
        time.sleep(0.02)
    return sum(map(ord, solution_str)) % 7 / 7
"""
DEFAULT = ("cluster=one-process", "rollout=tiny")
ATTENTION = ("cluster=one-process", "rollout=tiny", "rollout.tensor=2", "rollout.data_parallel_attention=2")
NODES = ("cluster=one-process", "rollout=tiny", "rollout.tensor=2", "rollout.nodes_per_engine=2")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(DEFAULT, id="default"),
        pytest.param(ATTENTION, id="data-parallel-attention", marks=pytest.mark.full),
        pytest.param(NODES, id="two-nodes", marks=pytest.mark.full),
    ],
)
def test_another_user_gets_nothing(shared: Path, shape: Sequence[str]) -> None:
    (shared / "reward.py").write_text(REWARD)
    prepare("arithmetic", shared / "data", None, load_config("e2e").data.prepare.options)
    words = ["--config-name", "e2e", f"data.prepare.out={shared / 'data'}", *shape, "actor=tiny"]
    words += ["reward=custom", f"reward.path={shared / 'reward.py'}", f"+reward.kwargs.folder={shared}"]
    words += [f"output_dir={shared}", "sft.steps=1", "trainer.total_steps=2", "trainer.val_before_train=false"]
    with Run(shared / "output", "train", *words) as run:
        os.chmod(run.temp_dir, 0o1777)  # as /tmp is: what protects must not be the test's own folder
        run.wait_for((shared / "live").exists)
        facts = facts_of(run, shared)
        (shared / "facts.json").write_text(json.dumps(facts))
        attempts = attempts_of_nobody(shared / "facts.json")
        (shared / "done").touch()
        exit_code = run.end(200)
    got = {name: what for name, what in attempts if what}
    assert got == {}
    assert len(attempts) >= 25 and len({name.split(" ")[0] for name, _ in attempts}) >= 8
    assert exit_code == 0, run.err
    train = [record["step"] for record in read_jsonl(shared / "e2e" / "metrics.jsonl") if record["phase"] == "train"]
    assert train == [1, 2]
    assert not (shared / "open" / "trap").exists(), "something unpickled what the intruder sent"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can enter, as the folders of a cluster's file system are."""
    folder = Path(tempfile.mkdtemp(prefix="hft-", dir="/tmp"))
    os.chmod(folder, 0o755)
    (folder / "open").mkdir()
    os.chmod(folder / "open", 0o777)
    yield folder
    shutil.rmtree(folder)


def attempts_of_nobody(facts: Path) -> list[list[str]]:
    """What each attempt got."""
    command = [sys.executable, "-m", "tests.security.intruder", str(facts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    attempts: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return attempts


def facts_of(run: Run, shared: Path) -> dict[str, Any]:
    """Where everything of the run is, for an intruder that has found it all out. Secrets are told as digests."""
    processes = processes_of(run.process.pid)
    found = listeners(processes)
    (ray,) = run.temp_dir.glob("hf-ray-*")
    engines = list(run.temp_dir.glob("hf-engine-*"))
    assert ray and engines
    session = (ray / "r" / "session_latest").resolve()
    folder = shared / "e2e"
    private = {"Ray's folder": ray, "Ray's session": session, "Ray's sockets": session / "sockets"}
    private |= {f"{engine.name.split('-')[1]} folder {i}": engine for i, engine in enumerate(engines)}
    run_files = {name: folder / name for name in ("metrics.jsonl", "config.yaml", "model/config.json")}
    logs = {f"log {path.name}": path for path in (folder / "logs").glob("*.log")}
    ray_logs = {f"Ray's {path.name}": path for path in (session / "logs").glob("*.out")}
    checkpoints = {
        str(path.relative_to(folder)): path for path in (folder / "checkpoints").rglob("*") if path.is_file()
    }
    keys = {f"keys of engine {i}": engine / "keys.yaml" for i, engine in enumerate(engines)}
    secret_files = {**keys, **ray_logs, **{name: path for name, path in logs.items() if "engine" in name}}
    return {
        "private": _text(private),
        "files": _text({**run_files, **logs, **ray_logs, **checkpoints, **keys}),
        "secret_files": _text(secret_files),
        "shared_memory": shared_memory(processes),
        "pids": [process.pid for process in processes],
        "digests": [hashlib.sha256(secret).hexdigest() for secret in secrets_of(processes, engines)],
        "unix": [one.address for one in found if one.kind == "unix"],
        "tcp": [[one.role, *_host_port(one)] for one in found if one.kind == "tcp"],
        "engines": [
            f"http://{h}:{p}"
            for one in found
            if one.role == "engine server"
            for h, p in [_host_port(one)]
            if one.kind == "tcp"
        ],
        "gcs": next("{}:{}".format(*_host_port(one)) for one in found if one.role == "Ray gcs"),
        "trap": str(shared / "open" / "trap"),
    }


def _text(paths: dict[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _host_port(listener: Listener) -> tuple[str, int]:
    host, _, port = listener.address.rpartition(":")
    return host.removeprefix("::ffff:"), int(port)


def shared_memory(processes: list[psutil.Process]) -> list[str]:
    """Files in /dev/shm that the processes have mapped or open."""
    found = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return sorted(path for path in found if os.path.exists(path))


def secrets_of(processes: list[psutil.Process], engines: list[Path]) -> list[bytes]:
    """Keys and tokens that must be in no command line."""
    names = ("RAY_AUTH_TOKEN", "HYBRIDFLOW_JOB_SECRET")
    found = {value for process in processes for name, value in process.environ().items() if name in names}
    for engine in engines:
        found |= set(yaml.safe_load((engine / "keys.yaml").read_text()).values())
    assert len(found) >= 2, "the run's secrets were not found, and nothing would be looked for"
    return [value.encode() for value in found]
