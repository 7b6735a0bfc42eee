"""ZeroMQ over TCP as SGLang uses it: with the plugin's hooks, only processes of the job exchange
messages."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import zmq
import zmq.asyncio

from hybridflow.engines.sglang import server_changes
from hybridflow.engines.sglang.server import environment
from hybridflow.engines.spec import EngineSpec
from hybridflow.process.rendezvous import master_store
from hybridflow.process.secret import VARIABLE

PLAIN = (zmq.Socket.bind, zmq.Socket.connect)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        # of every socket: what a stranger's socket could not send would hold the end up
        context.linger = 0
        yield context


def listening(context: zmq.Context) -> tuple[zmq.Socket, str]:
    pull = context.socket(zmq.PULL)
    server_changes.bind(PLAIN[0], pull, "tcp://127.0.0.1:*")
    return pull, pull.last_endpoint.decode()


def test_processes_of_the_job_exchange_messages(context: zmq.Context) -> None:
    pull, address = listening(context)
    push = context.socket(zmq.PUSH)
    server_changes.connect(PLAIN[1], push, address)
    push.send(b"hello")
    assert pull.poll(60_000) and pull.recv() == b"hello"


@pytest.mark.parametrize("has_curve", [False, True])
def test_a_stranger_is_not_heard(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch, has_curve: bool
) -> None:
    """With CURVE and keys of its own too: it does not know the public key of the end that
    listens."""
    pull, address = listening(context)
    push = context.socket(zmq.PUSH)
    if has_curve:
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, "guessed")
            server_changes.connect(PLAIN[1], push, address)
    else:
        push.connect(address)
    if push.poll(300, zmq.POLLOUT):
        push.send(b"x", zmq.NOBLOCK)
    assert not pull.poll(500)


def test_sockets_in_a_folder_stay_as_they_are(context: zmq.Context, tmp_path: object) -> None:
    address = f"ipc://{tmp_path}/s"
    pull = context.socket(zmq.PULL)
    push = context.socket(zmq.PUSH)
    server_changes.bind(PLAIN[0], pull, address)
    push.connect(address)
    push.send(b"hello")
    assert pull.poll(60_000)


def test_the_hooks_find_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("sglang.srt.plugins.hook_registry")
    from torch.distributed import distributed_c10d

    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", dict(rendezvous._rendezvous_handlers))
    monkeypatch.setattr(zmq.Socket, "bind", zmq.Socket.bind)
    monkeypatch.setattr(zmq.Socket, "connect", zmq.Socket.connect)
    hooks.HookRegistry.reset()
    server_changes.close_sockets()
    hooks.HookRegistry.apply_hooks()
    assert hooks.HookRegistry._patched == {"zmq.Socket.bind", "zmq.Socket.connect"}
    hooks.HookRegistry.reset()
    with zmq.Context() as context:
        for kind in (context, zmq.asyncio.Context.shadow(context)):
            socket = kind.socket(zmq.PULL)
            socket.bind("tcp://127.0.0.1:*")
            assert socket.curve_server and socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
            socket.close()


def test_the_ranks_of_an_engine_over_nodes_meet_in_the_jobs_store() -> None:
    spec = EngineSpec(
        name="e", model_path="/nowhere", tensor=2, nnodes=2, dist_init_addr="127.0.0.1:4"
    )
    url = environment(spec, "/folder")["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    assert (
        url == "hybridflow://127.0.0.1:4"
        and environment(spec, "/folder")[VARIABLE] == os.environ[VARIABLE]
    )
    other = environment(replace(spec, host="10.0.0.2", node_rank=1), "/folder")
    assert other["SGLANG_HOST_IP"] == "10.0.0.2"  # where this node's ranks are found by the others
    master = master_store("127.0.0.1", 0, 60.0)
    url = f"{server_changes.SCHEME}://127.0.0.1:{master.port}?rank=1&world_size=2"
    store, rank, world = next(server_changes.meet(url, timedelta(seconds=60)))
    store.set("here", "1")
    assert (rank, world, master.get("here")) == (1, 2, b"1")
