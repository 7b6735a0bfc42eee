"""Carry out one rank's part of a slice plan over a channel: pack, send; receive, put in place; and compare checksums.

Everything that depends on the plan alone (views of slices, their places in the messages) is made at the first sync of a session and used
again. A message that is one contiguous slice of a buffer is sent from there, and in place received there; others are packed, a list copy
each. Behind the messages each pair of ranks exchanges their checksums: nothing counts as received before they are found to be equal.
Memory for messages is bounded: a rank has `slots` times its largest message, a receiver that stages has what it receives.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.checksum import DIGEST_BYTES, Digests, seed_of
from hybridflow.reshard.messages import SEAL_TAG, Message
from hybridflow.reshard.slice_views import Copies, MessageViews
from hybridflow.reshard.transports.base import LendingReceiveChannel, LendingSendChannel, Loan, ReceiveChannel, SendChannel, Work

Buffers = Mapping[str, torch.Tensor]
Commit = Callable[[Buffers], None]
Seals = dict[int, Digests]

_ALIGN = 64  # bytes; of each message in a slab


@dataclass(frozen=True)
class StreamStats:
    """One rank's part of one sync.

    Attributes:
        payload_bytes: of slices, in the engine's dtype. overhead_bytes: of checksums.
        peak_staging_bytes: of the slabs and of the transport's slots that this rank's messages lay in (a host has the latter once).
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


@contextmanager
def _naming(message: Message) -> Iterator[None]:
    """Add to an error of the transport, which knows numbers alone, what the message carries."""
    try:
        yield
    except WeightSyncError as error:
        raise WeightSyncError(f"{error} (bucket {message.bucket}, {message.items[0].buffer} and what follows it)") from error


@contextmanager
def _naming_seal(peer: int) -> Iterator[None]:
    """The same for the message that carries a pair's checksums."""
    try:
        yield
    except WeightSyncError as error:
        raise WeightSyncError(f"{error} (the checksums behind all buckets exchanged with rank {peer})") from error


def largest_message(messages: Sequence[Message]) -> int:
    """Bytes of the largest, the one with a pair's checksums included."""
    counts = Counter(message.peer for message in messages)
    return max([0, *(message.nbytes for message in messages), *(seal_bytes(count) for count in counts.values())])


def seal_bytes(messages: int) -> int:
    """Bytes of the message with the checksums of so many."""
    return DIGEST_BYTES * messages


@torch.no_grad()
def send_stream(messages: Sequence[Message], buffers: Buffers, channel: SendChannel, staging: SendStaging) -> StreamStats:
    """Send a trainer rank's messages, cast to the engine's dtypes while they are packed, and to each peer the checksums of its own.

    Args:
        messages: `Messages.outgoing(rank)`; the same object in every sync, or views are prepared again.
        buffers: the rank's parameters by the names of the plan's layout; they must not change meanwhile.

    Raises:
        WeightSyncError: a peer is gone or late, or a buffer is missing or of another shape. The session must be aborted.
    """
    start, sync = time.perf_counter(), staging.begin(channel)
    copies, seals = staging.views.prepare(messages, buffers), _seals(messages)
    if isinstance(channel, LendingSendChannel):
        channel.rewind()
        used = _send_lent(messages, copies, channel, staging.rank, sync, seals)
    else:
        used = _send_from_slabs(messages, copies, channel, staging, sync, seals)
    for peer, digests in seals.items():
        with _naming_seal(peer):
            channel.send(peer, SEAL_TAG, digests.tensor(copies.device)).wait()
    return _stats(messages, used, start)


def _seals(messages: Sequence[Message]) -> Seals:
    """For each peer, in ascending order."""
    return {peer: Digests() for peer in sorted({message.peer for message in messages})}


def _stats(messages: Sequence[Message], used: int, start: float) -> StreamStats:
    payload = sum(message.nbytes for message in messages)
    return StreamStats(payload, seal_bytes(len(messages)), used, len(messages), time.perf_counter() - start)


def _send_from_slabs(
    messages: Sequence[Message], copies: Copies, channel: SendChannel, staging: SendStaging, sync: int, seals: Seals
) -> int:
    packed = [message for number, message in enumerate(messages) if copies.whole(number) is None]
    slabs = staging.allocate(staging.slots, largest_message(packed), copies.device) if packed else []
    under_way: deque[tuple[Message, Work]] = deque()

    def wait_for_oldest() -> None:
        sent, work = under_way.popleft()
        with _naming(sent):
            work.wait()

    turn = 0
    for number, message in enumerate(messages):
        if len(under_way) == staging.slots:
            wait_for_oldest()
        payload = copies.whole(number)
        if payload is None:
            payload = slabs[turn % staging.slots][: message.nbytes]
            copies.pack(number, payload)
            turn += 1
        seals[message.peer].add(payload, seed_of(sync, staging.rank, message.peer, message.tag))
        with _naming(message):
            under_way.append((message, channel.send(message.peer, message.tag, payload)))
    while under_way:
        wait_for_oldest()
    return staging.nbytes


def _send_lent(messages: Sequence[Message], copies: Copies, channel: LendingSendChannel, rank: int, sync: int, seals: Seals) -> int:
    """Pack straight into the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    for number, message in enumerate(messages):
        with _naming(message):
            payload = channel.lend(message.peer, message.tag, message.nbytes)
        copies.pack(number, payload)
        seals[message.peer].add(payload, seed_of(sync, rank, message.peer, message.tag))
        with _naming(message):
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
    """Receive an engine rank's messages and compare their checksums with the sender's.

    Args:
        messages: `Messages.incoming(rank)`; the same object in every sync, or views are prepared again.
        staged: keep everything until `Received.commit`; else each message is written as it comes, and found to be right or not at the end.
        buffers: the rank's parameters by the names of the plan's layout. The caller has checked that they are where they were.

    Raises:
        WeightSyncError: a peer is gone or late, a message is not what was sent (named), or a buffer is missing or of another shape.
            The session must be aborted; the buffers are untouched if `staged`, else a mixture of old and new.
    """
    start, sync = time.perf_counter(), staging.begin(channel)
    copies, seals = staging.views.prepare(messages, buffers), _seals(messages)
    commit: Commit | None
    if isinstance(channel, LendingReceiveChannel):
        channel.rewind()
    if not staged and isinstance(channel, LendingReceiveChannel):
        used, commit = _receive_lent(messages, copies, channel, staging.rank, sync, seals), None
    elif isinstance(channel, LendingReceiveChannel) and _has_room(channel, messages):
        used, commit = _receive_and_keep(messages, channel, staging, sync, seals)
    elif staged:
        used, commit = _receive_all(messages, channel, staging, copies.device, sync, seals)
    else:
        used, commit = _receive_in_place(messages, copies, channel, staging, sync, seals), None
    _compare(messages, channel, staging.rank, copies.device, seals)
    return Received(_stats(messages, used, start), commit)


def _arrivals(messages: Sequence[Message], channel: ReceiveChannel, slots: int, place: Callable[[int], torch.Tensor]) -> Iterator[int]:
    """Numbers of the messages as they have come to lie in `place(number)`; while one is dealt with, the next `slots` are received."""
    under_way: deque[Work] = deque()
    for number in range(len(messages) + slots):
        if number >= slots:
            with _naming(messages[number - slots]):
                under_way.popleft().wait()
            yield number - slots
        if number < len(messages):
            with _naming(messages[number]):
                under_way.append(channel.receive(messages[number].peer, messages[number].tag, place(number)))


def _receive_in_place(
    messages: Sequence[Message], copies: Copies, channel: ReceiveChannel, staging: ReceiveStaging, sync: int, seals: Seals
) -> int:
    """Contiguous slices are received where they belong, others in slabs."""
    packed = [number for number in range(len(messages)) if copies.whole(number) is None]
    slabs = staging.allocate(staging.slots, largest_message([messages[n] for n in packed]), copies.device) if packed else []
    slab_of = {number: slabs[turn % staging.slots] for turn, number in enumerate(packed)}

    def place(number: int) -> torch.Tensor:
        whole = copies.whole(number)
        return slab_of[number][: messages[number].nbytes] if whole is None else whole

    for number in _arrivals(messages, channel, staging.slots, place):
        payload, message = place(number), messages[number]
        seals[message.peer].add(payload, seed_of(sync, message.peer, staging.rank, message.tag))
        if number in slab_of:
            copies.scatter(number, payload)
    return staging.nbytes


def _receive_all(
    messages: Sequence[Message], channel: ReceiveChannel, staging: ReceiveStaging, device: torch.device, sync: int, seals: Seals
) -> tuple[int, Commit]:
    """Into one slab, where everything stays until the commit."""
    ends = list(accumulate(-(-message.nbytes // _ALIGN) * _ALIGN for message in messages))
    slab = staging.allocate(1, ends[-1], device)[0] if ends else torch.empty(0, dtype=torch.uint8, device=device)
    payloads = [slab[begin : begin + message.nbytes] for begin, message in zip([0, *ends], messages, strict=False)]
    for number in _arrivals(messages, channel, staging.slots, payloads.__getitem__):
        message = messages[number]
        seals[message.peer].add(payloads[number], seed_of(sync, message.peer, staging.rank, message.tag))

    def commit(target: Buffers) -> None:
        copies = staging.views.prepare(messages, target)
        for number, payload in enumerate(payloads):
            copies.scatter(number, payload)

    return staging.nbytes, commit


def _has_room(channel: LendingReceiveChannel, messages: Sequence[Message]) -> bool:
    """Whether the transport's memory takes all that each peer sends in a sync, its checksums as well."""
    counts = Counter(message.peer for message in messages)
    return max(counts.values(), default=0) < channel.slots


def _receive_and_keep(
    messages: Sequence[Message], channel: LendingReceiveChannel, staging: ReceiveStaging, sync: int, seals: Seals
) -> tuple[int, Commit]:
    """Leave what arrives where it is, in the transport's memory, which is this rank's staging then."""
    loans: list[Loan] = []
    for message in messages:
        with _naming(message):
            loans.append(channel.borrow(message.peer, message.tag, message.nbytes))
        seals[message.peer].add(loans[-1].payload, seed_of(sync, message.peer, staging.rank, message.tag))

    def commit(target: Buffers) -> None:
        copies = staging.views.prepare(messages, target)
        for number, loan in enumerate(loans):
            copies.scatter(number, loan.payload)
            loan.release()

    return sum(loan.payload.numel() for loan in loans), commit


def _receive_lent(messages: Sequence[Message], copies: Copies, channel: LendingReceiveChannel, rank: int, sync: int, seals: Seals) -> int:
    """Write straight from the transport's memory; returns the bytes of it that were used."""
    used: dict[int, int] = {}
    for number, message in enumerate(messages):
        with _naming(message):
            loan: Loan = channel.borrow(message.peer, message.tag, message.nbytes)
        payload = loan.payload
        seals[message.peer].add(payload, seed_of(sync, message.peer, rank, message.tag))
        copies.scatter(number, payload)
        used[payload.data_ptr()] = max(used.get(payload.data_ptr(), 0), payload.numel())
        loan.release()
    return sum(used.values())


def _compare(messages: Sequence[Message], channel: ReceiveChannel, rank: int, device: torch.device, seals: Seals) -> None:
    """Raise WeightSyncError for the first message that is not what was sent."""
    for peer, digests in seals.items():
        sent = torch.empty(seal_bytes(len(digests)), dtype=torch.uint8, device=device)
        with _naming_seal(peer):
            channel.receive(peer, SEAL_TAG, sent).wait()
        wrong = digests.first_difference(sent)
        if wrong is not None:
            message = [message for message in messages if message.peer == peer][wrong]
            raise WeightSyncError(
                f"engine rank {rank}: what arrived from trainer rank {peer} of bucket {message.bucket} "
                f"(from {message.items[0].buffer} on, {message.nbytes} bytes) has another checksum than what was sent; "
                "give the session up and sync again"
            )
