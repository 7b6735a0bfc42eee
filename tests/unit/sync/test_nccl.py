"""Point-to-point over NCCL without GPUs: a stand-in for torch's group with what its documentation
says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import master_store
from hybridflow.sync.meeting import Meeting
from hybridflow.sync.transports import p2p
from hybridflow.sync.transports.base import Endpoint, Payload

ENDPOINT = Endpoint(
    "p2p", "s", "127.0.0.1", 5, senders=(0,), receivers=(0,), message_bytes=8, timeout_s=60.0
)
CPU = torch.device("cpu")


class World:
    """Devices that run their kernels one after another; a kernel ends when each of its messages has
    met the other side's, in a kernel that runs at the same time. `num_senders`: ranks below it are
    the same devices in all sessions."""

    def __init__(self, num_senders: int) -> None:
        self.num_senders = num_senders
        self.changed = threading.Condition()
        self.joined: dict[str, set[int]] = {}
        self.calls: set[tuple[str, int, int, str]] = set()
        self.queues: dict[Any, deque[Kernel]] = {}

    def connect(self, group: Group) -> None:
        """A communicator comes about when all its ranks have called."""
        with self.changed:
            self.joined.setdefault(group.session, set()).add(group.rank)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.joined[group.session]) == group.size, 60)

    def start(self, group: Group, messages: list[Op]) -> Kernel:
        """Ranks that have not spoken before are connected by this call, which blocks meanwhile."""
        kernel = Kernel(group, messages)
        with self.changed:
            for op in messages:
                self.calls.add((group.session, *op.pair, op.method))
                self.changed.notify_all()
                other = "recv" if op.method == "send" else "send"
                assert self.changed.wait_for(
                    lambda pair=op.pair, o=other: (group.session, *pair, o) in self.calls, 60
                )
            device = group.rank if group.rank < self.num_senders else (group.session, group.rank)
            self.queues.setdefault(device, deque()).append(kernel)
            self._run()
        return kernel

    def _run(self) -> None:
        moved = True
        while moved:
            running = [queue[0] for queue in self.queues.values() if queue]
            sends = {
                (k.group.session, *op.pair): (k, op)
                for k in running
                for op in k.left
                if op.method == "send"
            }
            moved = False
            for kernel in running:
                for op in [op for op in kernel.left if op.method == "recv"]:
                    if (found := sends.get((kernel.group.session, *op.pair))) is not None:
                        op.tensor.copy_(found[1].tensor)
                        kernel.left.remove(op)
                        found[0].left.remove(found[1])
                        moved = True
            for queue in self.queues.values():
                while queue and not queue[0].left:
                    queue.popleft()
                    moved = True


class Op:
    def __init__(self, method: str, tensor: torch.Tensor, pair: tuple[int, int]) -> None:
        self.method = method
        self.tensor = tensor
        self.pair = pair


class Kernel:
    """The work of a group's messages. It counts as completed, without an error, when its group was
    aborted."""

    def __init__(self, group: Group, messages: list[Op]) -> None:
        self.group = group
        self.left = list(messages)

    def is_completed(self) -> bool:
        return not self.left or self.group.is_aborted

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None, "a deadline of NCCL's aborts the communicator"


class Group:
    """ProcessGroupNCCL: its watchdog ends the process when a transfer outlives the group's timeout,
    or on an error unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 as the group is made. Until it is
    connected for a device, and outside of a coalesced call, each message makes a communicator of
    its pair."""

    world: World
    made: list[Group]

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(max_ctas=32)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.rank = rank
        self.size = size
        self.options = options
        self.session = store._prefix if store is not None else ""
        self.errors_end_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self.is_connected = False
        self.is_aborted = False
        self.together = list[Op]()
        self.is_coalescing = False
        Group.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.world.connect(self)
        self.is_connected = True

    def _start_coalescing(self) -> None:
        self.is_coalescing = True

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add("send", tensors[0], (self.rank, peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add("recv", tensors[0], (peer, self.rank))

    def _add(self, method: str, tensor: torch.Tensor, pair: tuple[int, int]) -> None:
        assert self.is_connected and self.is_coalescing, "a communicator for this pair alone"
        self.together.append(Op(method, tensor, pair))

    def _end_coalescing(self) -> Kernel:
        messages = self.together
        self.together = []
        self.is_coalescing = False
        return self.world.start(self, messages)

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with NCCL, on whose devices CPU tensors lie."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(p2p, "_is_nccl", lambda device: True)
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(Group, "world", World(num_senders=2), raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, peer: subprocess.Popen[bytes]) -> None:
    """The peer has come to the session, and does nothing any more."""
    from hybridflow.sync import meeting

    client = SimpleNamespace(connection=SimpleNamespace(close=lambda: None, ask=lambda *words: []))
    of_peer = {0: {"process": peer.pid, "kernel": meeting._kernel()}}
    monkeypatch.setattr(p2p, "meet", lambda member: Meeting(client, of_peer))  # type: ignore[arg-type]
    monkeypatch.setattr(p2p, "client_store", lambda *where: client)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch, said: None) -> Any:
    """A receiver with a message under way."""
    monkeypatch.setattr(p2p.OverNccl, "_connect", lambda channel: None)
    monkeypatch.setattr(Group, "_end_coalescing", lambda group: Kernel(group, group.together))
    channel = p2p.open_receiver(replace(ENDPOINT), 0, CPU)
    Group.made[0].is_connected = True
    return channel


def started(channel: Any) -> Any:
    return channel.receive(0, 3, Payload(torch.zeros(2, dtype=torch.uint8)))


def in_thread(work: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_neither_time_nor_an_error_ends_the_process(channel: Any) -> None:
    (group,) = Group.made
    assert group.options._timeout > timedelta(days=1)
    assert not group.errors_end_process
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"  # of the process's other groups
    assert group.options.config.max_ctas <= 8, "there is a communicator for every engine"


def test_sessions_that_open_at_the_same_time_both_report_errors_alone(
    monkeypatch: pytest.MonkeyPatch, said: None
) -> None:
    """A trainer rank opens its session with each engine in a thread."""
    inside = threading.Event()
    both_inside = threading.Event()
    one_is_made = threading.Event()
    seen = []

    class Slow:
        """The first constructor lets a second begin, which would end after it."""

        Options = Group.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            if inside.is_set():
                both_inside.set()
                one_is_made.wait(60)
            inside.set()
            both_inside.wait(0.5)
            seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

    def open_first() -> None:
        p2p.open_sender(ENDPOINT, 0, CPU)
        one_is_made.set()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Slow)
    monkeypatch.setattr(p2p.OverNccl, "_connect", lambda channel: None)
    first = in_thread(open_first)
    assert inside.wait(60)
    p2p.open_sender(ENDPOINT, 0, CPU)
    first.join()
    assert seen == ["0", "0"]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_transfer_that_has_ended_is_done_and_a_late_one_fails_at_our_deadline(
    channel: Any,
) -> None:
    work = started(channel)
    channel.member.endpoint.__dict__["timeout_s"] = 0.5
    with pytest.raises(WeightSyncError, match=r"made no progress for 0\.5 s"):
        work.wait()
    work._batch.work.left.clear()
    work.wait()


def test_a_dead_peer_is_noticed_by_its_process(channel: Any, peer: subprocess.Popen[bytes]) -> None:
    work = started(channel)
    peer.kill()
    with pytest.raises(WeightSyncError, match="its process has ended"):
        work.wait()


def test_an_abort_by_another_thread_is_no_success(channel: Any) -> None:
    work = started(channel)
    threading.Timer(0.1, channel.abort).start()
    with pytest.raises(WeightSyncError, match="the session was already aborted"):
        work.wait()


def test_a_peer_that_dies_while_nccl_connects_is_an_error(
    peer: subprocess.Popen[bytes], said: None
) -> None:
    """NCCL itself would wait for it without a deadline."""
    threading.Timer(0.1, peer.kill).start()
    with pytest.raises(
        WeightSyncError, match=r"could not open the session because that rank.s process has ended"
    ):
        p2p.open_sender(ENDPOINT, 0, CPU)


def test_a_peer_that_never_connects_is_an_error_at_the_deadline(said: None) -> None:
    with pytest.raises(
        WeightSyncError,
        match=r"could not create a process group with engine ranks \[0\] within 0\.3 s",
    ):
        p2p.open_sender(replace(ENDPOINT, timeout_s=0.3), 0, CPU)


class Sessions:
    """Two trainer ranks with two engines of two ranks: a session an engine, each end a thread that
    opens its channel, says so and goes on when it may."""

    def __init__(self, slots: int) -> None:
        self._store = master_store("127.0.0.1", 0, 60)
        self._endpoint = replace(
            ENDPOINT, port=self._store.port, senders=(0, 1), receivers=(0, 1), slots=slots
        )
        self._failed: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.received: dict[tuple[int, int], list[int]] = {}

    def send(
        self, engine: int, rank: int, messages: list[tuple[int, int]], *opened: Any
    ) -> threading.Thread:
        """Send the messages, (receiver, value), in order, as soon as all `opened` are set; sets the
        first itself."""
        return self._run(self._send, engine, rank, messages, opened)

    def receive(self, engine: int, rank: int, senders: list[int], *opened: Any) -> threading.Thread:
        """Receive messages of these senders, in order."""
        return self._run(self._receive, engine, rank, senders, opened)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
        if self._failed:
            raise self._failed[0]
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._failed.append(error)

        self._threads.append(in_thread(guarded))
        return self._threads[-1]

    def _send(
        self, engine: int, rank: int, messages: list[tuple[int, int]], opened: tuple[Any, ...]
    ) -> None:
        channel = p2p.open_sender(replace(self._endpoint, session=f"e{engine}"), rank, CPU)
        _meet(opened)
        works = [
            channel.send(to, 0, Payload(torch.tensor([value], dtype=torch.uint8)))
            for to, value in messages
        ]
        for work in works:
            work.wait()

    def _receive(self, engine: int, rank: int, senders: list[int], opened: tuple[Any, ...]) -> None:
        channel = p2p.open_receiver(replace(self._endpoint, session=f"e{engine}"), rank, CPU)
        _meet(opened)
        into = [torch.zeros(1, dtype=torch.uint8) for _ in senders]
        for work in [
            channel.receive(peer, 0, Payload(each))
            for peer, each in zip(senders, into, strict=True)
        ]:
            work.wait()
        self.received[engine, rank] = [int(each) for each in into]


def _meet(opened: tuple[Any, ...]) -> None:
    if opened:
        opened[0].set()
        assert all(event.wait(60) for event in opened[1:])


def test_ranks_that_open_their_sessions_in_different_orders_all_open() -> None:
    """A communicator comes about when all ranks are there, so nothing may be held that another
    session needs: rank 0 opens engine 0's session first, rank 1 engine 1's."""
    sessions = Sessions(slots=2)
    sessions.send(0, 0, [])
    sessions.send(1, 1, [])
    for engine in (0, 1):
        for rank in (0, 1):
            sessions.receive(engine, rank, [])
    sessions.send(0, 1, [])
    sessions.send(1, 0, [])
    sessions.join()
    assert {name: len(ranks) for name, ranks in Group.world.joined.items()} == {
        "group/e0/": 4,
        "group/e1/": 4,
    }


def test_no_order_in_which_engines_are_served_stops_them() -> None:
    """Engine 0 takes rank 1's message before rank 0's, engine 1 the other way round. Rank 0 serves
    engine 0 first and rank 1 engine 1; a device's kernels run one after another. Were a message
    started before its receiver waits for it, each sender's first would stand before the one that
    the other's waits for."""
    sessions = Sessions(slots=2)
    all_open = [threading.Event() for _ in range(8)]
    ends = [[event, *all_open] for event in all_open]
    for engine, order in ((0, [1, 0]), (1, [0, 1])):
        for rank in (0, 1):
            sessions.receive(engine, rank, order, *ends[2 * engine + rank])
    early = [
        sessions.send(0, 0, [(0, 10), (1, 11)], *ends[4]),
        sessions.send(1, 1, [(0, 22), (1, 23)], *ends[5]),
    ]
    sessions.send(0, 1, [(0, 12), (1, 13)], ends[6][0], *all_open, Ended(early))
    sessions.send(1, 0, [(0, 20), (1, 21)], ends[7][0], *all_open, Ended(early))
    sessions.join()
    assert sessions.received == {
        (0, 0): [12, 10],
        (0, 1): [13, 11],
        (1, 0): [20, 22],
        (1, 1): [21, 23],
    }


class Ended:
    """An event for `_meet`: what the threads can start is started."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads

    def wait(self, timeout: float) -> bool:
        for thread in self._threads:
            thread.join(0.3)  # they go on only after this, so the time decides nothing
        return True


def test_a_receiver_takes_messages_of_several_senders_by_one_kernel() -> None:
    """Half of what may be under way; the senders of the next are called when it has arrived."""
    sessions = Sessions(slots=4)
    kernels = []
    start = World.start
    world = Group.world

    def noted(group: Group, messages: list[Op]) -> Kernel:
        if messages[0].method == "recv":
            kernels.append(len(messages))
        return start(world, group, messages)

    world.start = noted  # type: ignore[method-assign]
    sessions.receive(0, 0, [0, 1, 0, 1, 0])
    sessions.receive(0, 1, [])
    sessions.send(0, 0, [(0, 1), (0, 3), (0, 5)])
    sessions.send(0, 1, [(0, 2), (0, 4)])
    sessions.join()
    assert sessions.received[0, 0] == [1, 2, 3, 4, 5]
    connecting = [1] * 4
    messages = [2, 2, 1]
    assert sorted(kernels) == sorted(connecting + messages)
