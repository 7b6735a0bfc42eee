"""Executes one rank's part of a slice plan over a channel: pack and send, receive and scatter,
compare checksums.

Everything that depends only on the plan (views of slices, their positions in messages) is created
in the first sync of a session and reused. A message that is one contiguous slice of a buffer is
sent directly from there and, without staging, received directly into it. The others are packed with
one bulk copy each. After the messages, each pair of ranks exchanges checksums; nothing counts as
received until they match. Message memory is bounded: `slots` times the rank's largest message, or
everything received for a receiver that stages.

Copying a 1 MiB message evicts the interpreter from the core's cache, so the per-message path is
kept short.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.sync.messages import Message
from hybridflow.sync.staging import ReceiveStaging, SendStaging, seal_bytes
from hybridflow.sync.transports.base import (
    LAST_TAG,
    Digest,
    LendingReceiveChannel,
    LendingSendChannel,
    Loan,
    Payload,
    ReceiveChannel,
    SendChannel,
    Work,
    digest,
    first_difference,
    joined,
)

Buffers = Mapping[str, torch.Tensor]
Commit = Callable[[Buffers], None]


@dataclass(frozen=True)
class StreamStats:
    """Statistics of one rank's part of one sync.

    Attributes:
        payload_bytes: bytes of slices, in the engine's dtype.
        overhead_bytes: bytes of checksums.
        peak_staging_bytes: bytes of the slabs and of the transport's slots that held this rank's
            messages. Sender and receiver on one host share the slots.
        messages: number of messages.
        seconds: time from the first message to the last, without `Received.commit`.
    """

    payload_bytes: int
    overhead_bytes: int
    peak_staging_bytes: int
    messages: int
    seconds: float


class _RankSync:
    """A rank's state during one sync: per-message data and checksums.

    `at` is the message that is being processed or, during the exchange of checksums, the peer's
    rank.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        buffers: Buffers,
        channel: SendChannel | ReceiveChannel,
        staging: SendStaging | ReceiveStaging,
    ) -> None:
        self._start = time.perf_counter()
        self.messages = messages
        self.staging = staging
        self._seeds = staging.begin(channel, messages)
        self.copies = staging.prepare(messages, buffers)
        self._digests: list[Digest] = [0] * len(messages)
        self.at: Message | int = -1

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that adds the current message's bucket and first buffer to errors of the
        transport, which identify messages only by number.
        """
        try:
            yield
        except WeightSyncError as error:
            first = self.at
            where = ""
            if isinstance(first, int):
                where = " while exchanging checksums"
                first = next(message for message in self.messages if message.peer == self.at)
            raise WeightSyncError(
                f"{error}{where} (bucket {first.bucket}, starting at {first.items[0].buffer})"
            ) from error

    def take(self, number: int, payload: Payload) -> None:
        """Compute and store the checksum of a message."""
        self._digests[number] = digest(payload, self._seeds[number])

    def pack(self, number: int, payload: Payload) -> None:
        """Pack a message and store its checksum."""
        self._digests[number] = self.copies.pack(number, payload, self._seeds[number])

    def unpack(self, number: int, payload: Payload) -> None:
        """Write a message to the buffers and store its checksum."""
        self._digests[number] = self.copies.unpack(number, payload, self._seeds[number])

    def peers(self) -> list[int]:
        """Return the sorted ranks with which this rank exchanges messages."""
        return sorted({message.peer for message in self.messages})

    def digests(self, peer: int) -> list[Digest]:
        """Return the checksums of the messages to or from a peer, in order."""
        sums: list[Digest] = []
        for taken, message in zip(self._digests, self.messages, strict=True):
            if message.peer == peer:
                sums.append(taken)
        return sums

    def places(self, keep: bool = False) -> list[Payload]:
        """Return each message's memory. With `keep`, messages do not share memory."""
        return self.staging.places(self.messages, self.copies, keep)

    def stats(self, used: int) -> StreamStats:
        """Return the statistics so far. `used` is the number of bytes of memory that messages
        occupied."""
        payload = sum(message.nbytes for message in self.messages)
        count = len(self.messages)
        return StreamStats(
            payload, seal_bytes(count), used, count, time.perf_counter() - self._start
        )


@torch.no_grad()
def send_stream(
    messages: Sequence[Message], buffers: Buffers, channel: SendChannel, staging: SendStaging
) -> StreamStats:
    """Send a trainer rank's messages, then the checksums to each peer.

    Slices are cast to the engine's dtypes while packing.

    Args:
        messages: `Messages.outgoing(rank)`. Pass the same object in every sync, otherwise the
            views are rebuilt.
        buffers: the rank's parameters, keyed by their names in the plan's layout. They must not
            change during the transfer.

    Raises:
        WeightSyncError: a peer is lost or late, or a buffer is missing or has the wrong shape. The
            session must be aborted.
    """
    sync = _RankSync(messages, buffers, channel, staging)
    with sync.named():
        used = (
            _send_lent(sync, channel)
            if isinstance(channel, LendingSendChannel)
            else _send_from_slabs(sync, channel)
        )
        for peer in sync.peers():
            sync.at = peer
            channel.send(
                peer, LAST_TAG, Payload(joined(sync.digests(peer), sync.copies.device))
            ).wait()
    return sync.stats(used)


def _send_from_slabs(sync: _RankSync, channel: SendChannel) -> int:
    copies = sync.copies
    slots = sync.staging.slots
    in_flight: deque[tuple[Message, Work]] = deque()
    for number, (message, payload) in enumerate(zip(sync.messages, sync.places(), strict=True)):
        if len(in_flight) == slots:
            sync.at, work = in_flight.popleft()
            work.wait()
        sync.at = message
        if copies.whole(number) is payload:
            sync.take(number, payload)
        else:
            sync.pack(number, payload)
        in_flight.append((message, channel.send(message.peer, message.tag, payload)))
    for message, work in in_flight:
        sync.at = message
        work.wait()
    return sync.staging.nbytes


def _send_lent(sync: _RankSync, channel: LendingSendChannel) -> int:
    """Pack directly into the transport's memory. Returns the number of bytes used there."""
    channel.rewind()
    used: dict[int, int] = {}
    for number, message in enumerate(sync.messages):
        sync.at = message
        payload = channel.lend(message.peer, message.tag, message.nbytes)
        sync.pack(number, payload)
        channel.send(message.peer, message.tag, payload).wait()
        _note(used, payload)
    return sum(used.values())


class Received:
    """The result of receiving one sync. If staged, `commit` writes the engine's buffers and frees
    the staging memory."""

    def __init__(self, stats: StreamStats, commit: Commit | None) -> None:
        self.stats = stats
        self._commit = commit

    @torch.no_grad()
    def commit(self, buffers: Buffers) -> float:
        """Copy the staged weights into `buffers` and return the duration in seconds. No-op if the
        weights were received in place."""
        start = time.perf_counter()
        if self._commit is not None:
            self._commit(buffers)
            self._commit = None
        return time.perf_counter() - start


@torch.no_grad()
def receive_stream(
    messages: Sequence[Message],
    channel: ReceiveChannel,
    staging: ReceiveStaging,
    staged: bool,
    buffers: Buffers,
) -> Received:
    """Receive an engine rank's messages and compare their checksums with the sender's.

    Args:
        messages: `Messages.incoming(rank)`. Pass the same object in every sync, otherwise the
            views are rebuilt.
        staged: if True, keep all messages in staging memory until `Received.commit`. If False,
            write each message on arrival and verify at the end.
        buffers: the rank's parameters, keyed by their names in the plan's layout. The caller must
            have checked that none of them has moved.

    Raises:
        WeightSyncError: a peer is lost or late, a message was corrupted (the error names it), or a
            buffer is missing or has the wrong shape. The session must be aborted. If `staged`, the
            buffers are untouched; otherwise they contain a mixture of old and new weights.
    """
    sync = _RankSync(messages, buffers, channel, staging)
    commit: Commit | None = None
    with sync.named():
        if isinstance(channel, LendingReceiveChannel):
            channel.rewind()
        if isinstance(channel, LendingReceiveChannel) and not staged:
            used = _receive_lent(sync, channel)
        elif isinstance(channel, LendingReceiveChannel) and _has_room(channel, messages):
            used, commit = _receive_and_keep(sync, channel)
        elif staged:
            used, commit = _receive_all(sync, channel)
        else:
            used = _receive_in_place(sync, channel)
        sent = {peer: _checksums(sync, channel, peer) for peer in sync.peers()}
    for peer, theirs in sent.items():
        _compare(sync, peer, theirs)
    return Received(sync.stats(used), commit)


def _arrivals(sync: _RankSync, channel: ReceiveChannel, places: Sequence[Payload]) -> Iterator[int]:
    """Yield the index of each message once it has been received. Up to `slots` messages are in
    flight at a time."""
    messages = sync.messages
    slots = sync.staging.slots
    in_flight: deque[Work] = deque()
    for number in range(len(messages) + slots):
        if number >= slots:
            sync.at = messages[number - slots]
            in_flight.popleft().wait()
            yield number - slots
        if number < len(messages):
            sync.at = message = messages[number]
            in_flight.append(channel.receive(message.peer, message.tag, places[number]))


def _receive_in_place(sync: _RankSync, channel: ReceiveChannel) -> int:
    """Receive contiguous slices directly into their buffers and the others into slabs."""
    copies = sync.copies
    places = sync.places()
    for number in _arrivals(sync, channel, places):
        payload = places[number]
        if copies.whole(number) is payload:
            sync.take(number, payload)
        else:
            sync.unpack(number, payload)
    return sync.staging.nbytes


def _receive_all(sync: _RankSync, channel: ReceiveChannel) -> tuple[int, Commit]:
    """Receive all messages into one slab. The commit frees the slab, because the engine needs the
    memory between syncs."""
    messages = sync.messages
    staging = sync.staging
    places = sync.places(keep=True)
    for number in _arrivals(sync, channel, places):
        sync.take(number, places[number])

    def commit(target: Buffers) -> None:
        copies = staging.prepare(messages, target)
        for number, payload in enumerate(places):
            copies.scatter(number, payload)
        places.clear()
        staging.release()

    return staging.nbytes, commit


def _has_room(channel: LendingReceiveChannel, messages: Sequence[Message]) -> bool:
    """Return True if the transport has enough slots for all messages of a peer in one sync,
    including the checksums."""
    counts = Counter(message.peer for message in messages)
    return max(counts.values(), default=0) < channel.slots


def _receive_and_keep(sync: _RankSync, channel: LendingReceiveChannel) -> tuple[int, Commit]:
    """Leave received messages in the transport's memory, which serves as this rank's staging
    memory."""
    messages = sync.messages
    staging = sync.staging
    loans = list[Loan]()
    for number, message in enumerate(messages):
        sync.at = message
        loans.append(channel.borrow(message.peer, message.tag, message.nbytes))
        sync.take(number, loans[-1].payload)

    def commit(target: Buffers) -> None:
        copies = staging.prepare(messages, target)
        for number, loan in enumerate(loans):
            copies.scatter(number, loan.payload)
            loan.release()

    return sum(loan.payload.nbytes for loan in loans), commit


def _receive_lent(sync: _RankSync, channel: LendingReceiveChannel) -> int:
    """Scatter directly from the transport's memory. Returns the number of bytes used there."""
    used: dict[int, int] = {}
    for number, message in enumerate(sync.messages):
        sync.at = message
        loan = channel.borrow(message.peer, message.tag, message.nbytes)
        sync.unpack(number, loan.payload)
        _note(used, loan.payload)
        loan.release()
    return sum(used.values())


def _note(used: dict[int, int], payload: Payload) -> None:
    """Record a message's memory in `used`, {address in the transport's memory: maximum bytes
    used}."""
    where = payload.tensor.data_ptr()
    used[where] = max(used.get(where, 0), payload.nbytes)


def _checksums(sync: _RankSync, channel: ReceiveChannel, peer: int) -> torch.Tensor:
    """Receive a peer's checksums."""
    sync.at = peer
    sent = torch.empty(
        seal_bytes(len(sync.digests(peer))), dtype=torch.uint8, device=sync.copies.device
    )
    channel.receive(peer, LAST_TAG, Payload(sent)).wait()
    return sent


def _compare(sync: _RankSync, peer: int, sent: torch.Tensor) -> None:
    """Raise WeightSyncError if a checksum differs. The error names the first affected message from
    the peer."""
    wrong = first_difference(sync.digests(peer), sent)
    if wrong is not None:
        message = [message for message in sync.messages if message.peer == peer][wrong]
        raise WeightSyncError(
            f"engine rank {sync.staging.rank}: checksum mismatch in the message from trainer rank "
            f"{peer}, bucket {message.bucket} (starting at {message.items[0].buffer}, "
            f"{message.nbytes} bytes); abort the session and retry the sync"
        )
