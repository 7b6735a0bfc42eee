"""The job's store: torch's semantics for those who know the job's secret, nothing for those who do
not."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridflow.process import secret, signed_objects, store
from hybridflow.process.secret import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    VARIABLE,
    Greeting,
    digest,
    greet,
    greet_client,
)
from hybridflow.process.store import MasterStore, StoreClient, StoreError, StoreLate, _Frames
from hybridflow.process.torch_store import TorchStore

HOST = "127.0.0.1"


@pytest.fixture
def master() -> Iterator[MasterStore]:
    yield MasterStore(HOST, 0, 60.0)


def test_threads_that_ask_for_the_secret_at_once_are_given_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a run's driver does, which starts ranks in one thread and engines in another."""
    both = threading.Barrier(2)

    def draw(size: int) -> str:
        both.wait(30)
        return os.urandom(size).hex()

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(secret, "_drawn", {})
    monkeypatch.setattr(secret.secrets, "token_hex", draw)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: secret.job_secret(), range(2))
    assert first == second


def test_every_method_answers_as_torchs_own_store_does(master: MasterStore) -> None:
    ours = TorchStore(StoreClient(HOST, master.port, 60.0))
    oracle = dist.HashStore()
    script = [
        ("set", "a", "1"),
        ("get", "a"),
        ("add", "n", 3),
        ("add", "n", -5),
        ("get", "n"),
        ("compare_set", "c", "", "first"),
        ("compare_set", "c", "other", "second"),
        ("compare_set", "c", "first", "second"),
        ("compare_set", "absent", "something", "x"),
        ("check", ["a", "c"]),
        ("check", ["a", "absent"]),
        ("append", "a", "2"),
        ("get", "a"),
        ("multi_set", ["x", "y"], ["10", "20"]),
        ("multi_get", ["y", "x"]),
        ("delete_key", "a"),
        ("delete_key", "a"),
        ("check", ["a"]),
        ("num_keys",),
    ]
    for method, *arguments in script:
        assert getattr(ours, method)(*arguments) == getattr(oracle, method)(*arguments), (
            method,
            arguments,
        )


def test_a_wait_ends_with_the_key_or_at_its_deadline(master: MasterStore) -> None:
    client = StoreClient(HOST, master.port, 60.0)
    threading.Timer(0.2, master.set, ("late", "here")).start()
    assert client.get("late") == b"here"
    with pytest.raises(
        StoreLate, match=r"timeout after 0\.3 s while waiting for never, not this"
    ) as late:
        client.wait(["late", "never", "not this"], timedelta(seconds=0.3))
    assert late.value.missing == ["never", "not this"]
    assert client.check(["late"]), "the connection is of use after a deadline"


def test_a_server_that_ends_is_noticed_at_once() -> None:
    master = MasterStore(HOST, 0, 60.0)
    client = StoreClient(HOST, master.port, 60.0)
    threading.Timer(0.2, master.__dict__.pop, ("_server",)).start()
    # and not the deadline's error
    with pytest.raises(StoreError, match="lost the connection to the store"):
        client.get("never")


def test_large_values_and_several_clients_at_once(master: MasterStore) -> None:
    def add() -> None:
        client = StoreClient(HOST, master.port, 60.0)
        for _ in range(50):
            client.add("count", 1)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    value = os.urandom(5_000_000)
    master.set("large", value)
    for thread in threads:
        thread.join()
    assert master.get("large") == value and master.get("count") == b"400"


def test_process_groups_meet_in_it(master: MasterStore) -> None:
    """Two gloo ranks, as threads: C++ asks our store, with torch's own prefix before it."""
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    results: dict[int, float] = {}

    def run(rank: int) -> None:
        store = dist.PrefixStore("one", TorchStore(StoreClient(HOST, master.port, 60.0)))
        group = dist.ProcessGroupGloo(store, rank, 2, gloo)
        data = torch.tensor([float(rank + 1)])
        group.allreduce([data]).wait()
        results[rank] = float(data)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {0: 3.0, 1: 3.0}


# ---- strangers


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes without a word. A server that gives up before it has read all
    resets."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_another_secret_is_not_let_in(master: MasterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    master.set("key", "value")
    with monkeypatch.context() as patch:
        # the server's thread reads the variable too, so the stranger speaks by hand
        stranger = socket.create_connection((HOST, master.port), timeout=60)
        challenge = stranger.recv(CHALLENGE_BYTES)
        patch.setenv(VARIABLE, "guessed")
        mine = Greeting("store", is_client=True)
        mine.theirs = challenge
        guess = mine.challenge + mine.proof()
    stranger.sendall(guess)
    assert _is_closed(stranger)
    assert master.get("key") == b"value"


def test_a_proof_that_was_overheard_opens_nothing(master: MasterStore) -> None:
    """Replay: the bytes that a client of the job sent are sent again on another connection."""
    heard = b""
    with socket.create_connection((HOST, master.port), timeout=60) as first:
        greeting = Greeting("store", is_client=True)
        greeting.theirs = first.recv(CHALLENGE_BYTES)
        heard = greeting.challenge + greeting.proof()
        first.sendall(heard)
        assert len(first.recv(PROOF_BYTES)) == PROOF_BYTES
    with socket.create_connection((HOST, master.port), timeout=60) as second:
        second.recv(CHALLENGE_BYTES)
        second.sendall(heard)
        assert _is_closed(second)


def test_a_proof_does_not_serve_the_other_end_or_another_purpose() -> None:
    client = Greeting("store", is_client=True)
    server = Greeting("store", is_client=False)
    client.theirs = server.challenge
    server.theirs = client.challenge
    assert server.is_proven(client.proof()) and client.is_proven(server.proof())
    assert not client.is_proven(client.proof()), "reflected"
    other = Greeting("tcp", is_client=True)
    other.challenge = client.challenge
    other.theirs = client.theirs
    assert not server.is_proven(other.proof())
    assert digest("a", "bc") != digest("ab", "c")


def test_a_frame_repeated_changed_or_of_the_other_direction_is_refused() -> None:
    def received(frame: bytes) -> tuple[bytes, bytes]:
        return frame[8:40], frame[40:]

    client = _Frames(b"k", is_client=True)
    server = _Frames(b"k", is_client=False)
    frame = client.pack([b"set", b"a", b"1"])
    assert server.unpack(*received(frame)) == [b"set", b"a", b"1"]
    with pytest.raises(ConnectionError, match="forged, repeated or damaged"):
        server.unpack(*received(frame))
    with pytest.raises(ConnectionError, match="forged"):
        _Frames(b"k", is_client=True).unpack(*received(frame))
    mac, body = received(_Frames(b"k", is_client=True).pack([b"set", b"a", b"1"]))
    with pytest.raises(ConnectionError, match="forged"):
        _Frames(b"k", is_client=False).unpack(mac, body[:-1] + b"2")


def test_an_absurd_length_is_refused_before_it_is_read(master: MasterStore) -> None:
    client = StoreClient(HOST, master.port, 60.0)
    client.connection._socket.sendall(struct.pack("<Q", 1 << 62) + bytes(32))
    assert _is_closed(client.connection._socket)
    assert not master.check(["anything"])


@pytest.mark.parametrize(("purpose", "is_known"), [("one", True), ("another", False)])
def test_greet_tells_a_stranger_from_a_process_of_the_job(purpose: str, is_known: bool) -> None:
    client, server = socket.socketpair()

    async def answer() -> Greeting | None:
        reader, writer = await asyncio.open_unix_connection(sock=server)

        async def write(data: bytes) -> None:
            writer.write(data)

        try:
            return await greet_client(reader.readexactly, write, "one")
        finally:
            writer.close()

    found: list[Greeting | None] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(answer())))
    thread.start()
    if is_known:
        mine = greet(client, purpose, 60.0)
        thread.join()
        assert mine is not None and found[0] is not None and mine.key() == found[0].key()
    else:
        with pytest.raises(OSError, match="closed the connection"):  # the server says nothing more
            greet(client, purpose, 60.0)
        thread.join()
        assert found == [None]


def test_a_greeting_has_one_deadline_however_often_a_byte_comes() -> None:
    """Who listens where the store should be and sends a byte now and then holds a member no longer
    than silence."""
    client, server = socket.socketpair()
    sent = 0

    def drip() -> None:
        nonlocal sent
        with suppress(OSError):
            while sent < CHALLENGE_BYTES + PROOF_BYTES:
                server.send(b"x")
                sent += 1
                time.sleep(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        greet(client, "one", 0.5)
    client.close()
    thread.join()
    assert sent < CHALLENGE_BYTES


def test_a_thousand_strangers_leave_members_their_places(
    master: MasterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_GREETING_S", 600.0)  # so that no deadline makes room
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    member = StoreClient(HOST, master.port, 60.0)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as open_:
        strangers = [
            open_.enter_context(socket.create_connection((HOST, master.port), 60))
            for _ in range(1000)
        ]
        StoreClient(HOST, master.port, 60.0).set("key", "value")
        assert member.get("key") == b"value"
        # each stranger has a descriptor of its own here; the server has those of the lobby and of
        # the new member
        assert len(os.listdir("/proc/self/fd")) - before - len(strangers) <= 64 + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- what objects carry, and what children inherit


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch trap",)


def test_an_object_of_a_stranger_is_not_unpickled(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    file = io.BytesIO()
    signed_objects._Pickler(file).dump({"a": [1, 2]})
    data = file.getvalue()
    assert signed_objects._Unpickler(io.BytesIO(data)).load() == {"a": [1, 2]}
    forged = pickle.dumps(Trap())
    for bad in (forged, bytes(32) + forged, data[:32] + forged, b""):
        with pytest.raises(RuntimeError, match="not sent by a rank of this job"):
            signed_objects._Unpickler(io.BytesIO(bad)).load()
    assert not os.path.exists("trap")


def test_torchs_object_collectives_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d as torchs

    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(torchs, name, getattr(torchs, name))
    signed_objects.sign_objects()
    tensor, size = torchs._object_to_tensor({"x": 1}, torch.device("cpu"), None)
    assert torchs._tensor_to_object(tensor, int(size), None) == {"x": 1}
    tensor[40] ^= 1
    with pytest.raises(RuntimeError, match="not sent by a rank of this job"):
        torchs._tensor_to_object(tensor, int(size), None)
    monkeypatch.delattr(torchs, "_pickler")
    with pytest.raises(RuntimeError, match="has no _pickler"):
        signed_objects.sign_objects()


def test_the_secret_is_drawn_once_and_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(secret, "_drawn", {})
    drawn = secret.job_secret()
    assert len(drawn) == 64 and secret.job_secret() == drawn
    monkeypatch.setenv(VARIABLE, "given")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert secret.job_secret() == "given"
    assert not {VARIABLE, "RAY_AUTH_TOKEN"} & set(secret.without_credentials())
