"""Carry out one rank's part of a slice plan over a channel: pack, checksum, send; receive, check, put in place.

Everything that depends on the plan alone (views of slices, their places in the messages) is made at the first sync of a session and used
again; a repeat sync is one list copy and one checksum a message. Memory for messages is bounded: a sender has two slabs of its largest
message, a receiver two of its largest bucket, or, staged, one of all that it receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.checksum import TRAILER, is_sealed, seal, seed_of
from hybridflow.reshard.messages import Message
from hybridflow.reshard.slice_views import Copies, MessageViews
from hybridflow.reshard.transports.base import LendingReceiveChannel, LendingSendChannel, Loan, ReceiveChannel, SendChannel, Work

Buffers = Mapping[str, torch.Tensor]

_ALIGN = 64  # bytes; of each message in a slab


@dataclass(frozen=True)
class StreamStats:
    """One rank's part of one sync.

    Attributes:
        payload_bytes: of slices, in the engine's dtype. overhead_bytes: of checksums.
        peak_staging_bytes: of the slabs and of the transport's slots that this rank's messages lay in.
        messages: number of them. seconds: from the first message to the last; without `Received.commit`.
    """

    payload_bytes: int
    overhead_bytes: int
    peak_staging_bytes: int
    messages: int
    seconds: float


class _Staging:
    """A rank's memory and prepared views. Lives as long as the session, may outlive it; a new channel begins a new count of syncs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.views = MessageViews()
        self.slabs: list[torch.Tensor] = []
        self._channel: object = None
        self._syncs = 0

    def begin(self, channel: object) -> int:
        """The number of this sync in its session; both ends count alike and it goes into the checksums."""
        if channel is not self._channel:
            self.views.clear()  # some may be of the former channel's memory
            self._channel, self._syncs = channel, 0
        self._syncs += 1
        return self._syncs

    def allocate(self, count: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """`count` slabs of `nbytes`, those of the last sync where they fit."""
        fits = len(self.slabs) == count and all(slab.numel() >= nbytes and slab.device == device for slab in self.slabs)
        if not fits:
            if self.slabs:
                self.release()  # views of the old slabs would keep them alive
            self.slabs = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.slabs

    def release(self) -> None:
        """Give all memory back; the next sync makes it anew."""
        self.slabs = []
        self.views.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(slab.untyped_storage().nbytes() for slab in self.slabs)


class SendStaging(_Staging):
    """For `send_stream`: of trainer rank `rank`."""


class ReceiveStaging(_Staging):
    """For `receive_stream`: of engine rank `rank`."""


def largest_message(messages: Sequence[Message]) -> int:
    """Bytes of the largest payload, checksum included."""
    return max((message.nbytes for message in messages), default=0) + TRAILER


@torch.no_grad()
def send_stream(messages: Sequence[Message], buffers: Buffers, channel: SendChannel, staging: SendStaging) -> StreamStats:
    """Send a trainer rank's messages, cast to the engine's dtypes while they are packed.

    Args:
        messages: `Messages.outgoing(rank)`; the same object in every sync, or views are prepared again.
        buffers: the rank's parameters by the names of the plan's layout.

    Raises:
        WeightSyncError: a peer is gone or late, or a buffer is missing or of another shape. The session must be aborted.
    """
    start, sync = time.perf_counter(), staging.begin(channel)
    copies = staging.views.prepare(messages, buffers)
    if isinstance(channel, LendingSendChannel):
        lent = _send_lent(messages, copies, channel, staging.rank, sync)
    else:
        lent = 0
        _send_from_slabs(messages, copies, channel, staging, sync)
    payload = sum(message.nbytes for message in messages)
    return StreamStats(payload, TRAILER * len(messages), staging.nbytes + lent, len(messages), time.perf_counter() - start)


def _send_from_slabs(messages: Sequence[Message], copies: Copies, channel: SendChannel, staging: SendStaging, sync: int) -> None:
    if not messages:
        return
    slabs = staging.allocate(2, largest_message(messages), copies.device)
    under_way: list[Work | None] = [None, None]
    for number, message in enumerate(messages):
        turn = number % 2
        before = under_way[turn]
        if before is not None:
            before.wait()
        payload = slabs[turn][: message.nbytes + TRAILER]
        copies.pack(number, payload)
        seal(payload, seed_of(sync, staging.rank, message.peer, message.bucket))
        under_way[turn] = channel.send(message.peer, message.bucket, payload)
    for work in (under_way[len(messages) % 2], under_way[(len(messages) + 1) % 2]):
        if work is not None:
            work.wait()


def _send_lent(messages: Sequence[Message], copies: Copies, channel: LendingSendChannel, rank: int, sync: int) -> int:
    """Pack straight into the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    for number, message in enumerate(messages):
        payload = channel.lend(message.peer, message.bucket, message.nbytes + TRAILER)
        copies.pack(number, payload)
        seal(payload, seed_of(sync, rank, message.peer, message.bucket))
        channel.send(message.peer, message.bucket, payload).wait()
        used[payload.data_ptr()] = max(used.get(payload.data_ptr(), 0), payload.numel())
    return sum(used.values())


class Received:
    """What has arrived. Staged: nothing is written to the engine's buffers before `commit`."""

    def __init__(self, stats: StreamStats, commit: Callable[[Buffers], None] | None) -> None:
        self.stats = stats
        self._commit = commit

    @torch.no_grad()
    def commit(self, buffers: Buffers) -> float:
        """Write everything into `buffers`; returns the seconds it took. In place this was done already, and nothing happens."""
        start = time.perf_counter()
        if self._commit is not None:
            self._commit(buffers)
            self._commit = None  # the slab belongs to the next sync
        return time.perf_counter() - start


@torch.no_grad()
def receive_stream(
    messages: Sequence[Message], channel: ReceiveChannel, staging: ReceiveStaging, staged: bool, buffers: Buffers
) -> Received:
    """Receive an engine rank's messages and check each.

    Args:
        messages: `Messages.incoming(rank)`; the same object in every sync, or views are prepared again.
        staged: keep everything until `Received.commit`; else each message is written as soon as it is found to be right.
        buffers: the rank's parameters by the names of the plan's layout. The caller has checked that they are where they were.

    Raises:
        WeightSyncError: a peer is gone or late, a message is not what was sent (named), or a buffer is missing or of another shape.
            The session must be aborted; the buffers are untouched if `staged`, else a mixture of old and new.
    """
    start, sync = time.perf_counter(), staging.begin(channel)
    copies = staging.views.prepare(messages, buffers)
    if not staged and isinstance(channel, LendingReceiveChannel):
        used = _receive_lent(messages, copies, channel, staging.rank, sync)
    else:
        used = _receive_into_slabs(messages, copies, channel, staging, staged, sync)
    payload = sum(message.nbytes for message in messages)
    stats = StreamStats(payload, TRAILER * len(messages), used, len(messages), time.perf_counter() - start)
    if not staged:
        return Received(stats, None)

    def commit(target: Buffers) -> None:
        current = staging.views.prepare(messages, target)
        for number, place in enumerate(_staged_places(messages)):
            current.scatter(number, staging.slabs[0][place : place + messages[number].nbytes])

    return Received(stats, commit)


def _receive_into_slabs(
    messages: Sequence[Message], copies: Copies, channel: ReceiveChannel, staging: ReceiveStaging, staged: bool, sync: int
) -> int:
    """Two steps are under way: one is received while the other is checked and, in place, written."""
    steps = [list(group) for _, group in groupby(range(len(messages)), key=lambda number: messages[number].step)]
    if not steps:
        return 0
    if staged:
        places = [(0, place) for place in _staged_places(messages)]
        staging.allocate(1, _end(messages, range(len(messages))), copies.device)
    else:
        places = [(turn % 2, place) for turn, step in enumerate(steps) for place in _places(messages, step)]
        staging.allocate(2, max(_end(messages, step) for step in steps), copies.device)
    works: dict[int, Work] = {}

    def payload(number: int) -> torch.Tensor:
        slab, place = places[number]
        return staging.slabs[slab][place : place + messages[number].nbytes + TRAILER]

    def post(turn: int) -> None:
        for number in steps[turn] if turn < len(steps) else ():
            works[number] = channel.receive(messages[number].peer, messages[number].bucket, payload(number))

    post(0)
    post(1)
    for turn, step in enumerate(steps):
        for number in step:
            works.pop(number).wait()
            _check(messages[number], payload(number), staging.rank, sync)
            if not staged:
                copies.scatter(number, payload(number)[:-TRAILER])
        post(turn + 2)
    return staging.nbytes


def _receive_lent(messages: Sequence[Message], copies: Copies, channel: LendingReceiveChannel, rank: int, sync: int) -> int:
    """Check and write straight from the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    for number, message in enumerate(messages):
        loan: Loan = channel.borrow(message.peer, message.bucket, message.nbytes + TRAILER)
        payload = loan.payload
        _check(message, payload, rank, sync)
        copies.scatter(number, payload[:-TRAILER])
        used[payload.data_ptr()] = max(used.get(payload.data_ptr(), 0), payload.numel())
        loan.release()
    return sum(used.values())


def _check(message: Message, payload: torch.Tensor, rank: int, sync: int) -> None:
    if not is_sealed(payload, seed_of(sync, message.peer, rank, message.bucket)):
        raise WeightSyncError(
            f"engine rank {rank}: what arrived from trainer rank {message.peer} as bucket {message.bucket} "
            f"(from {message.items[0].buffer} on, {message.nbytes} bytes) has another checksum than what was sent; "
            "give the session up and sync again"
        )


def _places(messages: Sequence[Message], numbers: Sequence[int]) -> list[int]:
    """Where each of the messages begins when they lie one after another."""
    places, end = [], 0
    for number in numbers:
        places.append(end)
        end += -(-(messages[number].nbytes + TRAILER) // _ALIGN) * _ALIGN
    return places


def _end(messages: Sequence[Message], numbers: Sequence[int]) -> int:
    return _places(messages, numbers)[-1] + messages[numbers[-1]].nbytes + TRAILER


def _staged_places(messages: Sequence[Message]) -> list[int]:
    return _places(messages, range(len(messages)))
