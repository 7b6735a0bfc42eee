"""Another user of the machine, uid 65534, against a live run: whatever it tries gets it nothing, the run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
import zmq

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from hybridflow.engines.sglang import closed_sockets
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.process.rendezvous import master_store
from hybridflow.process.secret import VARIABLE, job_secret
from tests.e2e.runs import HYBRIDFLOW, Run
from tests.security.intruder import ATTEMPTS, CONTROL
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


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_each_attempt_succeeds_where_a_door_is_open(shared: Path, is_open: bool) -> None:
    """The doors alone, as they were and as they are: Ray's folder, a store, SGLang's ZeroMQ socket, an open file."""
    ray = shared / "ray"
    sockets = ray / "r" / "sockets"
    sockets.mkdir(parents=True)
    for folder in (ray / "r", sockets, ray) if is_open else (ray / "r", sockets):
        os.chmod(folder, 0o777)
    if not is_open:
        os.chmod(ray, 0o700)
    (sockets / "key").write_text("key")
    os.chmod(sockets / "key", 0o666)
    facts: dict[str, Any] = {"private": {"Ray's sockets": str(sockets)}, "files": {"a file": str(sockets / "key")}}
    facts |= {
        "secret_files": {"a key": str(sockets / "key")},
        "shared_memory": [],
        "pids": [os.getpid()],
        "digests": [],
    }
    facts |= {"kinds": 4, "trap": str(shared / "open" / "trap"), "job_secret": job_secret()}
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, socket.socket(socket.AF_UNIX) as named:
        named.bind(str(sockets / "raylet"))
        named.listen()
        os.chmod(sockets / "raylet", 0o777)
        pull.linger = 0
        if is_open:
            store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pull.bind("tcp://127.0.0.1:*")
        else:
            store = master_store("127.0.0.1", 0, 5.0)
            closed_sockets.bind(zmq.Socket.bind, pull, "tcp://127.0.0.1:*")
        store.set("rank/0", "address")
        heard = int(pull.last_endpoint.decode().rsplit(":", 1)[1])
        facts |= {
            "unix": [str(sockets / "raylet")],
            "tcp": [["store", "127.0.0.1", store.port], ["zmq", "127.0.0.1", heard]],
        }
        (shared / "facts.json").write_text(json.dumps(facts))
        attempts = attempts_of_nobody(shared / "facts.json")
        got = {name for name, what in attempts if what and not name.startswith(CONTROL)}
        controls = {name for name, what in attempts if what and name.startswith(CONTROL)}
        assert bool(pull.poll(10_000 if is_open else 100)) == is_open
        assert store.get("rank/0") == b"address"
    doors = {
        "list Ray's sockets",
        "create a file in Ray's sockets",
        "write a file",
        "read a key",
        "rename Ray's sockets",
    }
    doors |= {f"connect to {sockets / 'raylet'}", f"replace {sockets / 'raylet'}"}
    doors |= {f"speak torch's store to store at {store.port}", f"push a pickle over ZeroMQ to zmq at {heard}"}
    assert (doors - got == set()) if is_open else (got == set()), got
    right = {
        f"{CONTROL}speak our store to store at {store.port}",
        f"{CONTROL}shake hands over ZeroMQ to zmq at {heard}",
    }
    assert controls == (set() if is_open else right)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(DEFAULT, id="default", marks=pytest.mark.full),
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
    # the job's secret is given, as ranks that are forks do not show in /proc what they were told
    command = ("env", f"{VARIABLE}={secrets.token_hex(32)}", HYBRIDFLOW)
    with Run(shared / "output", "train", *words, command=command) as run:
        os.chmod(run.temp_dir, 0o1777)  # as /tmp is: what protects must not be the test's own folder
        run.wait_for((shared / "live").exists, 600)
        facts = facts_of(run, shared)
        (shared / "facts.json").write_text(json.dumps(facts))
        attempts = attempts_of_nobody(shared / "facts.json")
        (shared / "done").touch()
        exit_code = run.end(200)
    got = {name: what for name, what in attempts if what and not name.startswith(CONTROL)}
    assert got == {}
    assert len(attempts) >= 25 and len({name.split(" ")[0] for name, _ in attempts}) >= 8
    # the same attempts of the same user succeed with the right key: nothing else keeps the intruder out
    opened = [name.removeprefix(CONTROL) for name, what in attempts if what and name.startswith(CONTROL)]
    doors = ["/v1/models", "keys of Ray's gcs", "speak our store"]
    for door in doors if shape == DEFAULT else [*doors, "shake hands over ZeroMQ"]:
        assert any(name.startswith(door) for name in opened), (door, opened)
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
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch's store says for each failure with a stack
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    print(done.stderr[-1000:])
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
            "http://{}:{}".format(*_host_port(one))
            for one in found
            if one.role == "engine server" and one.kind == "tcp"
        ],
        "engine_keys": [yaml.safe_load((engine / "keys.yaml").read_text())["api-key"] for engine in engines],
        "job_secret": _in_environment(processes, VARIABLE),
        "ray_token": _in_environment(processes, "RAY_AUTH_TOKEN"),
        "gcs": next("{}:{}".format(*_host_port(one)) for one in found if one.role == "Ray gcs" and one.kind == "tcp"),
        "kinds": len(ATTEMPTS),
        "trap": str(shared / "open" / "trap"),
    }


def _in_environment(processes: list[psutil.Process], name: str) -> str:
    return next(value for process in processes if (value := process.environ().get(name)))


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
    names = ("RAY_AUTH_TOKEN", VARIABLE)
    found = {value for process in processes for name, value in process.environ().items() if name in names}
    for engine in engines:
        found |= set(yaml.safe_load((engine / "keys.yaml").read_text()).values())
    assert len(found) >= 2, "the run's secrets were not found, and nothing would be looked for"
    return [value.encode() for value in found]
