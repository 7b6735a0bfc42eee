"""The tcp transport within one process: order, strangers, wrong plans, an end in the middle. The
contract is in tests/dist."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.secret import CHALLENGE_BYTES, PROOF_BYTES
from hybridflow.sync.meeting import Member
from hybridflow.sync.transports import open_receiver, open_sender, tcp
from hybridflow.sync.transports.base import Endpoint, Payload
from hybridflow.sync.transports.tcp import Connections

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def store() -> Any:
    return master_store(HOST, 0, 60)


@pytest.fixture
def pair(store: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Both ends of a session of one rank each."""
    endpoint = Endpoint("tcp", request.node.name, HOST, store.port, (0,), (0,), 1 << 20, 60.0)
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(open_sender, endpoint, 0), pool.submit(open_receiver, endpoint, 0)
        sender, receiver = (end.result(120) for end in ends)
    yield sender, receiver
    for end in (sender, receiver):
        end.abort()


def payloads(*sizes: int) -> list[Payload]:
    made = [torch.Generator().manual_seed(size) for size in sizes]
    return [
        Payload(torch.randint(0, 256, (n,), dtype=torch.uint8, generator=g))
        for n, g in zip(sizes, made, strict=True)
    ]


def waits_for(sender: Connections, seconds: float) -> None:
    """Another deadline for what is read of the receiver."""
    sender._links[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tcp._timeval(seconds))


def zeros(size: int) -> Payload:
    return Payload(torch.zeros(size, dtype=torch.uint8))


def test_messages_of_any_size_arrive_in_order_and_are_acknowledged(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    sent = payloads(1, 7_000_000, 3, 1 << 16)
    got = [zeros(payload.nbytes) for payload in sent]

    def send() -> None:
        for work in [sender.send(0, tag, payload) for tag, payload in enumerate(sent)]:
            work.wait()

    thread = threading.Thread(target=send)
    thread.start()
    works = [receiver.receive(0, tag, into) for tag, into in enumerate(got)]
    for work in reversed(works):  # what was asked for before is read before
        work.wait()
    thread.join(120)
    assert not thread.is_alive()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(sent, got, strict=True))


def test_another_message_than_the_plan_says_is_an_error(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    sender.send(0, 5, payloads(10)[0])
    with pytest.raises(
        WeightSyncError,
        match=(
            r"expected message and bytes \[4, 10\], got \[5, 10\]; the two sides have "
            r"different plans"
        ),
    ):
        receiver.receive(0, 4, zeros(10)).wait()


def test_a_peer_that_leaves_and_one_that_does_nothing_are_told_apart(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    work = sender.send(0, 1, payloads(10)[0])
    waits_for(sender, 0.3)
    with pytest.raises(WeightSyncError, match=r"the peer made no progress for"):
        work.wait()  # nobody has read it
    waits_for(sender, 60.0)
    receiver.abort()
    with pytest.raises(WeightSyncError, match=r"the peer is gone: .*(closed|reset|Broken pipe)"):
        sender.send(0, 2, payloads(10_000_000)[0]).wait()
    sender.abort()
    with pytest.raises(WeightSyncError, match="already aborted"):
        sender.send(0, 3, payloads(1)[0])


def test_giving_up_wakes_another_thread_that_waits(
    pair: tuple[Connections, Connections], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, receiver = pair
    read = receiver.read
    begun = threading.Event()
    monkeypatch.setattr(receiver, "read", lambda *words: (begun.set(), read(*words)))

    def give_up() -> None:
        begun.wait(60)
        time.sleep(0.1)  # a wait that has not begun ends in the same way
        receiver.abort()

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(WeightSyncError, match="the session was aborted meanwhile"):
        receiver.receive(0, 1, zeros(10)).wait()
    thread.join()


def test_strangers_are_shown_the_door(store: Any) -> None:
    """Connections that say nothing, too little, or do not know the job's secret do not keep the
    sender out."""
    endpoint = Endpoint("tcp", "strangers", HOST, store.port, (0,), (0,), 64, 60.0)
    with ThreadPoolExecutor(2) as pool:
        receiver = pool.submit(open_receiver, endpoint, 0)
        client = client_store(HOST, store.port, 60)
        client.wait(["transport/strangers/engine/0"])
        said = json.loads(client.get("transport/strangers/engine/0"))
        strangers = [
            socket.create_connection((said["host"], said["port"]), timeout=60) for _ in range(2)
        ]
        strangers[0].sendall(b"hello")
        strangers[0].close()
        # rank 0, a challenge, a guess
        strangers[1].sendall(bytes(8 + CHALLENGE_BYTES + PROOF_BYTES))
        sender = pool.submit(open_sender, endpoint, 0)
        ends = sender.result(120), receiver.result(120)
    payload = payloads(50)[0]
    into = zeros(50)
    ends[0].send(0, 1, payload)
    ends[1].receive(0, 1, into).wait()
    assert torch.equal(payload.tensor, into.tensor)
    with strangers[1].makefile("rb") as said_to_stranger:
        # and its connection was closed
        assert len(said_to_stranger.read()) <= CHALLENGE_BYTES + PROOF_BYTES
    for end in ends:
        end.close()
    strangers[1].close()


@pytest.fixture
def accepting() -> Iterator[tuple[tuple[str, int], Any, Member]]:
    """Where an engine rank listens, the connections that it will have accepted, and its end."""
    member = Member(Endpoint("tcp", "crowd", HOST, 1, (0,), (0,), 64, 60.0), "engine", 0)
    with socket.create_server((HOST, 0), backlog=1024) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(tcp._accept_all, member, listener, time.monotonic() + 60.0)
        yield listener.getsockname(), accepted, member
        for link in accepted.result(120).values():
            link.close()


def _comes(where: tuple[str, int], member: Member) -> None:
    tcp._connected(where, 0, tcp._purpose(member, 0, 0), time.monotonic() + 60.0).close()


def test_nobody_waits_for_strangers_that_are_silent(
    accepting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are greeted at the same time, and beyond some number the oldest goes: their deadline
    plays no part."""
    monkeypatch.setattr(tcp, "_HELLO_S", 600.0)
    where, accepted, member = accepting
    with ExitStack() as open_:
        for number in range(1000):
            link = open_.enter_context(socket.create_connection(where, timeout=60))
            link.sendall(bytes(number % 50))
        _comes(where, member)
        assert set(accepted.result(120)) == {0}


def test_a_greeting_that_drips_has_one_deadline(
    accepting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_HELLO_S", 0.5)
    where, _, member = accepting
    sent = 0
    with socket.create_connection(where, timeout=60) as stranger, suppress(OSError):
        while sent < 8 + CHALLENGE_BYTES + PROOF_BYTES:
            stranger.sendall(bytes(1))
            sent += 1
            time.sleep(0.05)
    assert sent < CHALLENGE_BYTES
    _comes(where, member)
