"""Another user of the machine, uid 65534, against a live run: whatever it tries gets it nothing,
the run goes on."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from hybridflow.engines.sglang import server_changes
from hybridflow.process.rendezvous import master_store
from hybridflow.process.secret import job_secret
from tests.security import launchers, page
from tests.security.attempts import attempts_of_nobody, facts_of
from tests.security.intruder import CONTROL
from tests.security.inventory import rows, take
from tests.slurm.cluster import missing_programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0, reason="only root can become another user to make the attempts"
    ),
]
ROOT = Path(__file__).parents[2]
ATTENTION = (
    "cluster=one-process",
    "rollout=tiny",
    "rollout.tensor=2",
    "rollout.data_parallel_attention=2",
)
NODES = ("cluster=one-process", "rollout=tiny", "rollout.tensor=2", "rollout.nodes_per_engine=2")
FEWEST = 60  # attempts


@pytest.mark.parametrize(
    "is_open",
    [pytest.param(True, id="open", marks=pytest.mark.full), pytest.param(False, id="closed")],
)
def test_each_attempt_succeeds_where_a_door_is_open(shared: Path, is_open: bool) -> None:
    """The doors alone, as they were and as they are: Ray's folder, a store, SGLang's ZeroMQ socket,
    an open file."""
    ray = shared / "ray"
    sockets = ray / "r" / "sockets"
    sockets.mkdir(parents=True)
    for folder in (ray / "r", sockets, ray) if is_open else (ray / "r", sockets):
        os.chmod(folder, 0o777)
    if not is_open:
        os.chmod(ray, 0o700)
    (sockets / "key").write_text("key")
    os.chmod(sockets / "key", 0o666)
    facts: dict[str, Any] = {
        "private": {"Ray's sockets": str(sockets)},
        "files": {"a file": str(sockets / "key")},
    }
    facts |= {
        "open": [],
        "locks": [],
        "fork_servers": [],
        "secret_files": {"a key": str(sockets / "key")},
        "shared_memory": [],
        "pids": [os.getpid()],
        "digests": [],
    }
    facts |= {"kinds": 4, "trap": str(shared / "open" / "trap"), "job_secret": job_secret()}
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        socket.socket(socket.AF_UNIX) as named,
    ):
        named.bind(str(sockets / "raylet"))
        named.listen()
        os.chmod(sockets / "raylet", 0o777)
        pull.linger = 0
        if is_open:
            store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pull.bind("tcp://127.0.0.1:*")
        else:
            store = master_store("127.0.0.1", 0, 5.0)
            server_changes.bind(zmq.Socket.bind, pull, "tcp://127.0.0.1:*")
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
    doors |= {
        f"speak torch's store to store at {store.port}",
        f"push a pickle over ZeroMQ to zmq at {heard}",
    }
    assert (doors - got == set()) if is_open else (got == set()), got
    right = {
        f"{CONTROL}speak our store to store at {store.port}",
        f"{CONTROL}shake hands over ZeroMQ to zmq at {heard}",
    }
    assert controls == (set() if is_open else right)


@contextmanager
def _shaped(shape: Sequence[str]) -> Iterator[launchers.Live]:
    with launchers.shared_folder() as shared, launchers.local(shared, shape) as live:
        yield live


RUNS = {
    **page.RUNS,
    "data-parallel-attention": partial(_shaped, ATTENTION),
    "two-nodes": partial(_shaped, NODES),
}


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_another_user_gets_nothing(shared: Path, run: str) -> None:
    """The run ends well in the end, with its steps: its context says so."""
    if run == "slurm" and (missing := missing_programs()):
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)} missing): make setup-slurm installs it"
        )
    with RUNS[run]() as live:
        processes = live.processes()
        taken = take(processes, live.run_folders)
        page.show(run, taken)
        (shared / "facts.json").write_text(json.dumps(facts_of(taken, processes, shared)))
        attempts = attempts_of_nobody(shared / "facts.json")
    assert taken.faults == ()
    if described := page.described(run):
        assert described == rows(taken.edges), (
            "python -m tests.security.page writes the table again"
        )
    got = {name: what for name, what in attempts if what and not name.startswith(CONTROL)}
    assert got == {}
    tried = [name for name, _ in attempts if not name.startswith(CONTROL)]
    print(f"{run}: {len(tried)} attempts of {len({name.split(' ')[0] for name in tried})} kinds")
    assert len(tried) >= FEWEST and len({name.split(" ")[0] for name in tried}) >= 8
    # the same attempts of the same user succeed with the right key: nothing else keeps the intruder
    # out
    opened = [
        name.removeprefix(CONTROL) for name, what in attempts if what and name.startswith(CONTROL)
    ]
    doors = ["keys of Ray's gcs", "speak our store", *([] if run == "slurm" else ["/v1/models"])]
    for door in (
        [*doors, "shake hands over ZeroMQ"]
        if run in ("data-parallel-attention", "two-nodes")
        else doors
    ):
        assert any(name.startswith(door) for name in opened), (door, opened)
    assert not (shared / "open" / "trap").exists(), "something unpickled what the intruder sent"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can enter, with one in it where that user can write."""
    with launchers.shared_folder() as folder:
        (folder / "open").mkdir()
        os.chmod(folder / "open", 0o777)
        yield folder
