"""Messages in memory shared by sender and receiver, with one protocol for host and GPU memory.

Every (sender, receiver) pair has a few slots and a small file with counters. The sender packs into
a slot (`lend`) and the receiver copies from it into the engine's buffers (`borrow`), so each byte
is copied once per side. A `SlotMemory` decides where the slots are stored and how one side detects
that the other side's work on a slot has completed. On a CPU, work has always completed; on GPUs,
inter-process events are used. Files are anonymous (`memfd_create`) and opened by the peer through
`/proc/PID/fd/N`. They have no name to clean up and are freed with the last process that maps them,
even after a crash.

A waiter sleeps until notified (`Notifier`) and is woken immediately if the peer process exits. No
device ever waits for another process. All waits are on the host and have a deadline.

A counter is written after the data it refers to. x86 preserves that order for readers; on other
machines a torn message fails its checksum and the sync fails.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.process.store import StoreError, StoreLate
from hybridflow.sync.meeting import Meeting, Member, PeerWatch, meet
from hybridflow.sync.transports.base import DONE, Endpoint, Payload, Work

_PAGE = 4096
# int64 indices in the header, one cache line apart; each is written by one side only
_WRITTEN = 0
_TAKEN = 8
_SENDER_LEFT = 16
_RECEIVER_LEFT = 24
_LABELS = 32
_SPIN_S = 5e-5  # about the cost of sleeping and being woken
_SETTLE_S = 2e-4  # polling interval for a device, which cannot notify
# longest sleep: aborting the session from another thread of this process does not wake the waiter
_LOOK_S = 0.1


class Slots(Protocol):
    """One side's view of the slots shared by a (sender, receiver) pair."""

    def at(self, slot: int, nbytes: int) -> Payload:
        """Return the first `nbytes` bytes of a slot. Repeated calls return the same object until
        the slot's memory is reallocated."""

    def hand_over(self, slot: int) -> None:
        """Make the other side's next access to the slot wait for this side's pending work on it."""

    def is_ready(self, slot: int) -> bool:
        """Return True if the work that the other side started before its last hand-over of the slot
        has completed."""

    def close(self) -> None:
        """Release the memory. Idempotent."""


class SlotMemory(Protocol):
    """Allocates or maps the slots for one endpoint of a session."""

    def file_bytes(self, endpoint: Endpoint) -> int:
        """Return the number of bytes that a pair's file needs after the counters."""

    def offer(self, member: Member, peer: int) -> Any:
        """Return the JSON-able data that the other side needs to open the shared slots."""

    def open(self, member: Member, peer: int, offered: Any, file: torch.Tensor) -> Slots:
        """Open the slots shared with a peer, given the result of the peer's `offer`.

        Args:
            file: uint8, the shared part of the pair's file that follows the counters.
        """


def make_pipes() -> list[int]:
    """Create a pipe in each direction for a pair. Returns the descriptors [sender reads, sender
    writes, receiver reads, receiver writes]."""
    (sender_reads, receiver_writes), (receiver_reads, sender_writes) = (
        os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)
    )
    return [sender_reads, sender_writes, receiver_reads, receiver_writes]


def open_pipes(process: int, receiver: Sequence[int]) -> tuple[int, int]:
    """Open the receiver's two descriptors in the receiver's process.

    Raises:
        OSError: the sender's process does not permit access.
    """
    reads = os.open(f"/proc/{process}/fd/{receiver[0]}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return reads, os.open(
            f"/proc/{process}/fd/{receiver[1]}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError:
        os.close(reads)
        raise


class Notifier:
    """Wakes the other side of a pair when the shared memory has changed.

    There is one pipe in each direction, polled together with the peer's process. Polling with
    sleeps would be too slow for waits of microseconds and wasteful for waits of seconds. Pipes are
    used rather than an eventfd because another process can open them through `/proc/PID/fd/N`. The
    notifier owns its two descriptors.
    """

    def __init__(self, reads: int, writes: int, watch: PeerWatch) -> None:
        self._fds = [reads, writes]
        # The session may be aborted by another thread, after which a closed descriptor number may
        # refer to another file.
        self._lock = threading.Lock()
        self._watch = watch
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)
        if watch.fd >= 0:
            self._poll.register(watch.fd, select.POLLIN)

    def notify(self) -> None:
        """Wake the other side, now or at its next wait."""
        # a full pipe wakes the peer anyway; a broken one has no reader left
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            if self._fds:
                os.write(self._fds[1], b"\0")

    def wait(self, is_ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until `is_ready()` is true, and return the result of its last call.

        Returns early if the other side notifies or its process exits, or at `deadline` (a
        `time.monotonic` time).
        """
        if _spin(is_ready):
            return True
        self._poll.poll(min(max(deadline - time.monotonic(), 0), _LOOK_S) * 1000)
        with self._lock, suppress(BlockingIOError):
            if self._fds:
                os.read(self._fds[0], 1 << 16)
        return is_ready()

    def close(self) -> None:
        """Close the pipes. Idempotent."""
        with self._lock:
            fds = self._fds
            self._fds = []
            for fd in fds:
                os.close(fd)


def _spin(is_ready: Callable[[], bool]) -> bool:
    end = time.monotonic() + _SPIN_S
    while not is_ready():
        if time.monotonic() > end:
            return False
        os.sched_yield()
    return True


class _Segment:
    """One side's view of a pair's counters and slots."""

    def __init__(
        self,
        member: Member,
        peer: int,
        fd: int,
        memory: SlotMemory,
        offered: Any,
        watch: PeerWatch,
        notifier: Notifier,
    ) -> None:
        self._member = member
        self._peer = peer
        self._watch = watch
        self._notifier = notifier
        endpoint = member.endpoint
        header = header_bytes(member.endpoint)
        size = header + memory.file_bytes(endpoint)
        file = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self._header = file[:header].view(torch.int64).numpy()
        self._num_slots = endpoint.slots
        self._slot_bytes = slot_bytes(endpoint)
        self._slots = memory.open(member, peer, offered, file[header:])
        self._mine, self._theirs = (
            (_SENDER_LEFT, _RECEIVER_LEFT)
            if member.side == "trainer"
            else (_RECEIVER_LEFT, _SENDER_LEFT)
        )
        self.count = 0  # messages that this side has written or started to read
        self._before = 0  # count at the last rewind

    def free_slot(self, tag: int, nbytes: int) -> Payload:
        """Wait until the receiver has consumed the previous message in the next slot, and return
        the slot."""
        if nbytes > self._slot_bytes:
            what = f"a message of {nbytes} bytes does not fit in a slot of {self._slot_bytes} bytes"
            raise self._member.failure(self._peer, tag, what)
        slot = self.count % self._num_slots
        taken = max(self._before, self.count - self._num_slots + 1)
        self._wait(tag, lambda: int(self._header[_TAKEN]) >= taken)
        if taken > 0:
            self._settle(tag, slot)
        return self._slots.at(slot, nbytes)

    def publish(self, tag: int, nbytes: int) -> None:
        """Make the message in the slot returned by `free_slot` visible to the receiver."""
        slot = self.count % self._num_slots
        self._slots.hand_over(slot)
        label = _LABELS + 2 * slot
        self._header[label], self._header[label + 1] = tag, nbytes
        self.count += 1
        self._header[_WRITTEN] = self.count
        self._notifier.notify()

    def message(self, tag: int, nbytes: int) -> Payload:
        """Wait for the next message and return it."""
        slot = self.count % self._num_slots
        self._wait(tag, lambda: int(self._header[_WRITTEN]) > self.count)
        self._settle(tag, slot)
        label = _LABELS + 2 * slot
        found = (int(self._header[label]), int(self._header[label + 1]))
        if found != (tag, nbytes):
            what = (
                f"expected {nbytes} bytes, got message {found[0]} of {found[1]} bytes; the two "
                "sides have different plans"
            )
            raise self._member.failure(self._peer, tag, what)
        payload = self._slots.at(slot, nbytes)
        self.count += 1
        return payload

    def take(self) -> None:
        """Release the slot of the oldest outstanding `message`, so that the sender can reuse it."""
        self._slots.hand_over(int(self._header[_TAKEN]) % self._num_slots)
        self._header[_TAKEN] += 1
        self._notifier.notify()

    def rewind(self) -> None:
        """Wrap around to the first slot. The sender blocks until all earlier messages have been
        consumed."""
        self._before = self.count
        self.count = -(-self.count // self._num_slots) * self._num_slots
        if self._mine == _RECEIVER_LEFT:
            self._header[_TAKEN] = self.count

    def leave(self) -> None:
        """Tell the other side that this side is done, and release all resources."""
        self._header[self._mine] = 1
        self._notifier.notify()
        self._notifier.close()
        self._watch.close()
        self._slots.close()

    def _settle(self, tag: int, slot: int) -> None:
        """Wait until the other side's work on a slot has completed.

        The host waits, not the device: a device waiting for an exited process would hang forever.
        """
        deadline = time.monotonic() + self._member.endpoint.timeout_s
        while not self._slots.is_ready(slot):
            ended = self._watch.has_ended()
            # checked after `has_ended`: an abort sets it before releasing the watch
            if self._header[self._mine]:
                raise self._member.failure(self._peer, tag, "the session was aborted meanwhile")
            if ended and not self._slots.is_ready(slot):
                raise self._member.lost(self._peer, tag)
            if time.monotonic() > deadline:
                raise self._member.late(self._peer, tag)
            time.sleep(_SETTLE_S)

    def _wait(self, tag: int, is_ready: Callable[[], bool]) -> None:
        if is_ready():
            return
        deadline = time.monotonic() + self._member.endpoint.timeout_s
        while not self._notifier.wait(is_ready, deadline):
            ended = self._watch.has_ended()
            left = bool(self._header[self._theirs])
            if self._header[self._mine]:
                raise self._member.failure(self._peer, tag, "the session was aborted meanwhile")
            # the peer may have finished just before it exited
            if (ended or left) and not is_ready():
                raise self._member.lost(
                    self._peer,
                    tag,
                    "its process has ended" if ended else "it has closed the session",
                )
            if time.monotonic() > deadline:
                raise self._member.late(self._peer, tag)


class _End:
    """Operations shared by both ends."""

    member: Member
    _segments: dict[int, _Segment]

    def _segment(self, peer: int, tag: int) -> _Segment:
        segment = self._segments.get(peer)
        if segment is None:
            raise self.member.failure(
                peer, tag, "the session was already aborted, or has no such rank"
            )
        return segment

    def rewind(self) -> None:
        for segment in self._segments.values():
            segment.rewind()

    def close(self) -> None:
        """Close this end. Messages already sent can still be received."""
        self.abort()

    def abort(self) -> None:
        segments = self._segments
        self._segments = {}
        for segment in segments.values():
            segment.leave()


class Sender(_End):
    """A trainer rank's end of a session."""

    def __init__(self, member: Member, memory: SlotMemory) -> None:
        self.member = member
        # per receiver: descriptors of the segment, the sender's and the receiver's pipe ends
        fds = {
            peer: [
                os.memfd_create(f"hybridflow-{member.rank}-{peer}", os.MFD_CLOEXEC),
                *make_pipes(),
            ]
            for peer in member.peers
        }
        self._segments = {}
        try:
            for segment, *_ in fds.values():
                os.ftruncate(
                    segment, header_bytes(member.endpoint) + memory.file_bytes(member.endpoint)
                )
            segments = {peer: (each[0], *each[3:]) for peer, each in fds.items()}
            meeting = meet(member, segments=segments, offers=_offers(member, memory))
            watches = _watches(member, meeting)
            # the receivers open these descriptors through our PID, so they must stay open until
            # mapped
            _wait_for_maps(member, meeting)
            for peer, each in fds.items():
                notifier = Notifier(each.pop(1), each.pop(1), watches[peer])
                offered = meeting.peers[peer]["offers"][str(member.rank)]
                self._segments[peer] = _Segment(
                    member, peer, each[0], memory, offered, watches[peer], notifier
                )
        finally:
            for each in fds.values():
                for fd in each:
                    os.close(fd)

    def lend(self, peer: int, tag: int, nbytes: int) -> Payload:
        """Wait for free memory for the next message and return it."""
        return self._segment(peer, tag).free_slot(tag, nbytes)

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Send a payload. Returns once the payload is in a slot."""
        segment = self._segment(peer, tag)
        slot = segment.free_slot(tag, payload.nbytes)
        if slot is not payload:
            slot.tensor.copy_(payload.tensor)
        segment.publish(tag, payload.nbytes)
        return DONE


class Receiver(_End):
    """An engine rank's end of a session."""

    def __init__(self, member: Member, memory: SlotMemory) -> None:
        self.member = member
        meeting = meet(member, offers=_offers(member, memory))
        watches = _watches(member, meeting)
        self._segments = {}
        self._pending: dict[int, list[_Arrival]] = {peer: [] for peer in member.peers}
        for peer, said in meeting.peers.items():
            number, *pipes = said["segments"][str(member.rank)]
            try:
                fd = os.open(f"/proc/{said['process']}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    notifier = Notifier(*open_pipes(said["process"], pipes), watches[peer])
                    offered = said["offers"][str(member.rank)]
                    self._segments[peer] = _Segment(
                        member, peer, fd, memory, offered, watches[peer], notifier
                    )
                finally:
                    os.close(fd)
            except OSError as error:
                what = (
                    f"could not open its memory ({error}); run both ranks as the same user, or set "
                    "rollout.sync.transport=p2p"
                )
                raise member.failure(peer, 0, what) from error
        meeting.store.set(f"mapped/{member.rank}", "")

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Register a receive. `wait` copies the data."""
        arrival = _Arrival(self, self._segment(peer, tag), peer, tag, into)
        self._pending[peer].append(arrival)
        return arrival

    @property
    def slots(self) -> int:
        """Number of messages per peer that can be borrowed at the same time."""
        return self.member.endpoint.slots

    def borrow(self, peer: int, tag: int, nbytes: int) -> SlotLoan:
        """Wait for the next message from a peer and return it."""
        segment = self._segment(peer, tag)
        return SlotLoan(segment.message(tag, nbytes), segment)

    def take_up_to(self, arrival: _Arrival) -> None:
        """Complete all earlier receives from the same peer, then this one."""
        pending = self._pending[arrival.peer]
        while not arrival.is_done:
            pending[0].copy()
            pending.pop(0)


def end_of(member: Member) -> type[Sender] | type[Receiver]:
    """Return the class that implements this rank's end."""
    return Sender if member.side == "trainer" else Receiver


class SlotLoan:
    """A message that stays in its slot until released."""

    def __init__(self, payload: Payload, segment: _Segment) -> None:
        self.payload = payload
        self._segment = segment

    def release(self) -> None:
        """Return the slot to the sender."""
        self._segment.take()


class _Arrival:
    def __init__(
        self, receiver: Receiver, segment: _Segment, peer: int, tag: int, into: Payload
    ) -> None:
        self.peer = peer
        self.is_done = False
        self._receiver = receiver
        self._segment = segment
        self._tag = tag
        self._into = into

    def wait(self) -> None:
        self._receiver.take_up_to(self)

    def copy(self) -> None:
        self._into.tensor.copy_(self._segment.message(self._tag, self._into.nbytes).tensor)
        self._segment.take()
        self.is_done = True


def slot_bytes(endpoint: Endpoint) -> int:
    """Return the size of a slot in bytes, rounded up to pages. Pages that are never written take no
    memory."""
    return -(-endpoint.message_bytes // _PAGE) * _PAGE


def header_bytes(endpoint: Endpoint) -> int:
    """Return the size in bytes of a pair's header: the counters, and each slot's message tag and
    message size."""
    return -(-8 * (_LABELS + 2 * endpoint.slots) // _PAGE) * _PAGE


def _offers(member: Member, memory: SlotMemory) -> dict[int, Any]:
    return {peer: memory.offer(member, peer) for peer in member.peers}


def _watches(member: Member, meeting: Meeting) -> dict[int, PeerWatch]:
    watches = {peer: PeerWatch(said) for peer, said in meeting.peers.items()}
    for peer, watch in watches.items():
        if not watch.is_local:
            raise member.failure(
                peer,
                0,
                "the two ranks are not on the same host (or in the same PID namespace); set "
                "rollout.sync.transport=p2p",
            )
    return watches


def _wait_for_maps(member: Member, meeting: Meeting) -> None:
    keys = [f"mapped/{peer}" for peer in member.peers]
    try:
        meeting.store.wait(keys, timedelta(seconds=member.endpoint.timeout_s))
    except StoreError as error:
        missing = (
            [int(key.rpartition("/")[2]) for key in error.missing]
            if isinstance(error, StoreLate)
            else []
        )
        raise WeightSyncError(
            f"session {member.endpoint.session}: engine ranks {missing} did not map the memory of "
            f"trainer rank {member.rank} within {member.endpoint.timeout_s:g} s; see their logs"
        ) from error
