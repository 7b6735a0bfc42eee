"""Carry out one rank's part of a slice plan over a channel: pack, send; receive, put in place; and compare checksums.

Everything that depends on the plan alone (views of slices, their places in the messages) is made at the first sync of a
session and used again. A message that is one contiguous slice of a buffer is sent from there, and in place received
there; others are packed, a list copy each. Behind the messages each pair of ranks exchanges their checksums: nothing
counts as received before they are found to be equal. Memory for messages is bounded: a rank has `slots` times its
largest message, a receiver that stages has what it receives.

What is done for each message is kept short: after a megabyte has gone through a core's cache, Python's own code comes
from memory.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.sync.checksum import Digest, digest, first_difference, joined
from hybridflow.sync.messages import Message
from hybridflow.sync.payload import Payload
from hybridflow.sync.staging import ReceiveStaging, SendStaging, seal_bytes
from hybridflow.sync.transports.base import (
    LAST_TAG,
    LendingReceiveChannel,
    LendingSendChannel,
    Loan,
    ReceiveChannel,
    SendChannel,
    Work,
)

Buffers = Mapping[str, torch.Tensor]
Commit = Callable[[Buffers], None]


@dataclass(frozen=True)
class StreamStats:
    """One rank's part of one sync.

    Attributes:
        payload_bytes: of slices, in the engine's dtype. overhead_bytes: of checksums.
        peak_staging_bytes: of the slabs and of the transport's slots that this rank's messages lay in (a host has the
            latter once).
        messages: number of them. seconds: from the first message to the last; without `Received.commit`.
    """

    payload_bytes: int
    overhead_bytes: int
    peak_staging_bytes: int
    messages: int
    seconds: float


class _Course:
    """One sync of a rank: what it needs for every message, and its checksums.

    As a context it adds to an error of the transport, which knows numbers alone, what the message `at` hand carries. A
    peer's number there stands for the checksums behind all messages to or from it.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        buffers: Buffers,
        channel: SendChannel | ReceiveChannel,
        staging: SendStaging | ReceiveStaging,
    ) -> None:
        self._start = time.perf_counter()
        self.messages, self.staging = messages, staging
        self._seeds = staging.begin(channel, messages)
        self.copies = staging.views.prepare(messages, buffers)
        self._digests: list[Digest] = [0] * len(messages)
        self.at: Message | int = -1

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, WeightSyncError):
            first, where = self.at, ""
            if isinstance(first, int):
                first, where = (
                    next(message for message in self.messages if message.peer == self.at),
                    " while checksums were exchanged",
                )
            raise WeightSyncError(
                f"{error}{where} (bucket {first.bucket}, {first.items[0].buffer} and what follows it)"
            ) from error

    def take(self, number: int, payload: Payload) -> None:
        """Take the checksum of a message."""
        self._digests[number] = digest(payload, self._seeds[number])

    def peers(self) -> list[int]:
        """Ascending."""
        return sorted({message.peer for message in self.messages})

    def digests(self, peer: int) -> list[Digest]:
        """Of the messages to or from a peer, in order."""
        return [taken for taken, message in zip(self._digests, self.messages, strict=True) if message.peer == peer]

    def places(self, keep: bool = False) -> list[Payload]:
        """See `staging.places`."""
        return self.staging.places(self.messages, self.copies, keep)

    def stats(self, used: int) -> StreamStats:
        """Of the sync so far, in which `used` bytes held messages."""
        payload = sum(message.nbytes for message in self.messages)
        count = len(self.messages)
        return StreamStats(payload, seal_bytes(count), used, count, time.perf_counter() - self._start)


@torch.no_grad()
def send_stream(
    messages: Sequence[Message], buffers: Buffers, channel: SendChannel, staging: SendStaging
) -> StreamStats:
    """Send a trainer rank's messages, cast to the engine's dtypes while they are packed, and to each peer the checksums
    of its own.

    Args:
        messages: `Messages.outgoing(rank)`; the same object in every sync, or views are prepared again.
        buffers: the rank's parameters by the names of the plan's layout; they must not change meanwhile.

    Raises:
        WeightSyncError: a peer is gone or late, or a buffer is missing or of another shape. The session must be
        aborted.
    """
    course = _Course(messages, buffers, channel, staging)
    with course:
        used = (
            _send_lent(course, channel)
            if isinstance(channel, LendingSendChannel)
            else _send_from_slabs(course, channel)
        )
        for peer in course.peers():
            course.at = peer
            channel.send(peer, LAST_TAG, Payload(joined(course.digests(peer), course.copies.device))).wait()
    return course.stats(used)


def _send_from_slabs(course: _Course, channel: SendChannel) -> int:
    copies, slots = course.copies, course.staging.slots
    under_way: deque[tuple[Message, Work]] = deque()
    for number, (message, payload) in enumerate(zip(course.messages, course.places(), strict=True)):
        if len(under_way) == slots:
            course.at, work = under_way.popleft()
            work.wait()
        course.at = message
        if copies.whole(number) is not payload:
            copies.pack(number, payload)
        course.take(number, payload)
        under_way.append((message, channel.send(message.peer, message.tag, payload)))
    for message, work in under_way:
        course.at = message
        work.wait()
    return course.staging.nbytes


def _send_lent(course: _Course, channel: LendingSendChannel) -> int:
    """Pack straight into the transport's memory; returns the bytes of it that were used."""
    channel.rewind()
    used = _Used()
    for number, message in enumerate(course.messages):
        course.at = message
        payload = channel.lend(message.peer, message.tag, message.nbytes)
        course.copies.pack(number, payload)
        course.take(number, payload)
        channel.send(message.peer, message.tag, payload).wait()
        used.note(payload)
    return used.nbytes


class Received:
    """What has arrived. Staged: nothing is written to the engine's buffers before `commit`."""

    def __init__(self, stats: StreamStats, commit: Commit | None) -> None:
        self.stats = stats
        self._commit = commit

    @torch.no_grad()
    def commit(self, buffers: Buffers) -> float:
        """Write everything into `buffers`; returns the seconds it took. In place this was done already, and nothing
        happens."""
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
        staged: keep everything until `Received.commit`; else each message is written as it comes, and found to be right
            or not at the end.
        buffers: the rank's parameters by the names of the plan's layout. The caller has checked that they are where
            they were.

    Raises:
        WeightSyncError: a peer is gone or late, a message is not what was sent (named), or a buffer is missing or of
        another shape.
            The session must be aborted; the buffers are untouched if `staged`, else a mixture of old and new.
    """
    course = _Course(messages, buffers, channel, staging)
    commit: Commit | None = None
    with course:
        if isinstance(channel, LendingReceiveChannel):
            channel.rewind()
        if isinstance(channel, LendingReceiveChannel) and not staged:
            used = _receive_lent(course, channel)
        elif isinstance(channel, LendingReceiveChannel) and _has_room(channel, messages):
            used, commit = _receive_and_keep(course, channel)
        elif staged:
            used, commit = _receive_all(course, channel)
        else:
            used = _receive_in_place(course, channel)
        sent = {peer: _checksums(course, channel, peer) for peer in course.peers()}
    for peer, theirs in sent.items():
        _compare(course, peer, theirs)
    return Received(course.stats(used), commit)


def _arrivals(course: _Course, channel: ReceiveChannel, places: Sequence[Payload]) -> Iterator[int]:
    """Numbers of the messages as they have come to lie in their places; while one is dealt with, the next `slots` are
    received."""
    messages, slots = course.messages, course.staging.slots
    under_way: deque[Work] = deque()
    for number in range(len(messages) + slots):
        if number >= slots:
            course.at = messages[number - slots]
            under_way.popleft().wait()
            yield number - slots
        if number < len(messages):
            course.at = message = messages[number]
            under_way.append(channel.receive(message.peer, message.tag, places[number]))


def _receive_in_place(course: _Course, channel: ReceiveChannel) -> int:
    """Contiguous slices are received where they belong, others in slabs."""
    copies, places = course.copies, course.places()
    for number in _arrivals(course, channel, places):
        payload = places[number]
        course.take(number, payload)
        if copies.whole(number) is not payload:
            copies.scatter(number, payload)
    return course.staging.nbytes


def _receive_all(course: _Course, channel: ReceiveChannel) -> tuple[int, Commit]:
    """Into one slab, where everything stays until the commit."""
    messages, staging, places = course.messages, course.staging, course.places(keep=True)
    for number in _arrivals(course, channel, places):
        course.take(number, places[number])

    def commit(target: Buffers) -> None:
        copies = staging.views.prepare(messages, target)
        for number, payload in enumerate(places):
            copies.scatter(number, payload)

    return staging.nbytes, commit


def _has_room(channel: LendingReceiveChannel, messages: Sequence[Message]) -> bool:
    """Whether the transport's memory takes all that each peer sends in a sync, its checksums as well."""
    counts = Counter(message.peer for message in messages)
    return max(counts.values(), default=0) < channel.slots


def _receive_and_keep(course: _Course, channel: LendingReceiveChannel) -> tuple[int, Commit]:
    """Leave what arrives where it is, in the transport's memory, which is this rank's staging then."""
    messages, staging, loans = course.messages, course.staging, list[Loan]()
    for number, message in enumerate(messages):
        course.at = message
        loans.append(channel.borrow(message.peer, message.tag, message.nbytes))
        course.take(number, loans[-1].payload)

    def commit(target: Buffers) -> None:
        copies = staging.views.prepare(messages, target)
        for number, loan in enumerate(loans):
            copies.scatter(number, loan.payload)
            loan.release()

    return sum(loan.payload.nbytes for loan in loans), commit


def _receive_lent(course: _Course, channel: LendingReceiveChannel) -> int:
    """Write straight from the transport's memory; returns the bytes of it that were used."""
    used = _Used()
    for number, message in enumerate(course.messages):
        course.at = message
        loan = channel.borrow(message.peer, message.tag, message.nbytes)
        payload = loan.payload
        course.take(number, payload)
        course.copies.scatter(number, payload)
        used.note(payload)
        loan.release()
    return used.nbytes


class _Used:
    """Counts the transport's memory that messages lay in."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def note(self, payload: Payload) -> None:
        """A message lies there."""
        where = payload.tensor.data_ptr()
        self._ends[where] = max(self._ends.get(where, 0), payload.nbytes)

    @property
    def nbytes(self) -> int:
        """The largest that each place has held, together."""
        return sum(self._ends.values())


def _checksums(course: _Course, channel: ReceiveChannel, peer: int) -> torch.Tensor:
    """Those of a peer, as it sent them."""
    course.at = peer
    sent = torch.empty(seal_bytes(len(course.digests(peer))), dtype=torch.uint8, device=course.copies.device)
    channel.receive(peer, LAST_TAG, Payload(sent)).wait()
    return sent


def _compare(course: _Course, peer: int, sent: torch.Tensor) -> None:
    """Raise WeightSyncError for the first message of a peer that is not what was sent."""
    wrong = first_difference(course.digests(peer), sent)
    if wrong is not None:
        message = [message for message in course.messages if message.peer == peer][wrong]
        raise WeightSyncError(
            f"engine rank {course.staging.rank}: what arrived from trainer rank {peer} of bucket {message.bucket} "
            f"(from {message.items[0].buffer} on, {message.nbytes} bytes) has another checksum than what was sent; "
            "give the session up and sync again"
        )
