"""Carry out one rank's part of a slice plan over a channel: pack, checksum, send; receive, check, put in place.

Everything that depends on the plan alone (views of slices, their places in the messages) is made at the first sync of a session and used
again; a repeat sync is one list copy and one checksum a message. Memory for messages is bounded: a rank has `slots` times its largest
message, a receiver that stages has what it receives.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.checksum import TRAILER, is_sealed, seal, seed_of
from hybridflow.reshard.messages import Message
from hybridflow.reshard.slice_views import Copies, MessageViews
from hybridflow.reshard.transports.base import LendingReceiveChannel, LendingSendChannel, Loan, ReceiveChannel, SendChannel, Work

Buffers = Mapping[str, torch.Tensor]
Commit = Callable[[Buffers], None]

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
    """A rank's memory and prepared views. Lives as long as the session, may outlive it; a new channel begins a new count of syncs.

    Args:
        rank: of the trainer or of the engine. slots: messages that may be under way at a time, two or more.
    """

    def __init__(self, rank: int, slots: int = 2) -> None:
        self.rank, self.slots = rank, slots
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
    slabs = staging.allocate(staging.slots, largest_message(messages), copies.device)
    under_way: deque[Work] = deque()
    for number, message in enumerate(messages):
        if len(under_way) == staging.slots:
            under_way.popleft().wait()
        payload = slabs[number % staging.slots][: message.nbytes + TRAILER]
        copies.pack(number, payload)
        seal(payload, seed_of(sync, staging.rank, message.peer, message.tag))
        under_way.append(channel.send(message.peer, message.tag, payload))
    for work in under_way:
        work.wait()


def _send_lent(messages: Sequence[Message], copies: Copies, channel: LendingSendChannel, rank: int, sync: int) -> int:
    """Pack straight into the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    channel.rewind()
    for number, message in enumerate(messages):
        payload = channel.lend(message.peer, message.tag, message.nbytes + TRAILER)
        copies.pack(number, payload)
        seal(payload, seed_of(sync, rank, message.peer, message.tag))
        channel.send(message.peer, message.tag, payload).wait()
        used[payload.data_ptr()] = max(used.get(payload.data_ptr(), 0), payload.numel())
    return sum(used.values())


class Received:
    """What has arrived. Staged: nothing is written to the engine's buffers before `commit`."""

    def __init__(self, stats: StreamStats, commit: Commit | None) -> None:
        self.stats = stats
        self._commit = commit

    @torch.no_grad()
    def commit(self, buffers: Buffers) -> float:
        """Write everything into `buffers`; returns the seconds it took. In place this was done already, and nothing happens."""
        start = time.perf_counter()
        if self._commit is not None:
            self._commit(buffers)
            self._commit = None  # the memory belongs to the next sync
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
        used, commit = _receive_lent(messages, copies, channel, staging.rank, sync), None
    elif isinstance(channel, LendingReceiveChannel) and _has_room(channel, messages):
        used, commit = _receive_and_keep(messages, channel, staging, sync)
    else:
        used, commit = _receive_into_slabs(messages, copies, channel, staging, staged, sync)
    payload = sum(message.nbytes for message in messages)
    stats = StreamStats(payload, TRAILER * len(messages), used, len(messages), time.perf_counter() - start)
    return Received(stats, commit)


def _receive_into_slabs(
    messages: Sequence[Message], copies: Copies, channel: ReceiveChannel, staging: ReceiveStaging, staged: bool, sync: int
) -> tuple[int, Commit | None]:
    """While one message is checked and, in place, written, the next `slots` are received."""
    if not messages:
        return 0, None
    if staged:
        places = [(0, place) for place in _staged_places(messages)]
        staging.allocate(1, places[-1][1] + messages[-1].nbytes + TRAILER, copies.device)
    else:
        places = [(number % staging.slots, 0) for number in range(len(messages))]
        staging.allocate(staging.slots, largest_message(messages), copies.device)
    under_way: deque[Work] = deque()

    def payload(number: int) -> torch.Tensor:
        slab, place = places[number]
        return staging.slabs[slab][place : place + messages[number].nbytes + TRAILER]

    def post(number: int) -> None:
        if number < len(messages):
            under_way.append(channel.receive(messages[number].peer, messages[number].tag, payload(number)))

    for number in range(staging.slots):
        post(number)
    for number, message in enumerate(messages):
        under_way.popleft().wait()
        _check(message, payload(number), staging.rank, sync)
        if not staged:
            copies.scatter(number, payload(number)[:-TRAILER])
        post(number + staging.slots)

    def commit(target: Buffers) -> None:
        current = staging.views.prepare(messages, target)
        for number in range(len(messages)):
            current.scatter(number, payload(number)[:-TRAILER])

    return staging.nbytes, commit if staged else None


def _has_room(channel: LendingReceiveChannel, messages: Sequence[Message]) -> bool:
    """Whether the transport's memory takes all that each peer sends in a sync."""
    counts = Counter(message.peer for message in messages)
    return max(counts.values(), default=0) <= channel.slots


def _receive_and_keep(
    messages: Sequence[Message], channel: LendingReceiveChannel, staging: ReceiveStaging, sync: int
) -> tuple[int, Commit | None]:
    """Check what arrives and leave it where it is, in the transport's memory, which is this rank's staging then."""
    loans: list[Loan] = []
    channel.rewind()
    for message in messages:
        loans.append(channel.borrow(message.peer, message.tag, message.nbytes + TRAILER))
        _check(message, loans[-1].payload, staging.rank, sync)

    def commit(target: Buffers) -> None:
        copies = staging.views.prepare(messages, target)
        for number, loan in enumerate(loans):
            copies.scatter(number, loan.payload[:-TRAILER])
            loan.release()

    return sum(loan.payload.numel() for loan in loans), commit


def _receive_lent(messages: Sequence[Message], copies: Copies, channel: LendingReceiveChannel, rank: int, sync: int) -> int:
    """Check and write straight from the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    channel.rewind()
    for number, message in enumerate(messages):
        loan: Loan = channel.borrow(message.peer, message.tag, message.nbytes + TRAILER)
        payload = loan.payload
        _check(message, payload, rank, sync)
        copies.scatter(number, payload[:-TRAILER])
        used[payload.data_ptr()] = max(used.get(payload.data_ptr(), 0), payload.numel())
        loan.release()
    return sum(used.values())


def _check(message: Message, payload: torch.Tensor, rank: int, sync: int) -> None:
    if not is_sealed(payload, seed_of(sync, message.peer, rank, message.tag)):
        raise WeightSyncError(
            f"engine rank {rank}: what arrived from trainer rank {message.peer} as bucket {message.bucket} "
            f"(from {message.items[0].buffer} on, {message.nbytes} bytes) has another checksum than what was sent; "
            "give the session up and sync again"
        )


def _staged_places(messages: Sequence[Message]) -> list[int]:
    """Where each message begins when they lie one after another."""
    places, end = [], 0
    for message in messages:
        places.append(end)
        end += -(-(message.nbytes + TRAILER) // _ALIGN) * _ALIGN
    return places
