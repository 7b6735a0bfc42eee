"""Messages in memory that sender and receiver both see: one protocol for host memory and for memory of GPUs.

Every (sender, receiver) pair has a few slots, and a small file with counters. The sender packs into a slot (`lend`) and
the receiver writes the engine's buffers from it (`borrow`): each byte is copied once on either side. Where the slots
lie, and how one side knows that what the other has started on a slot is done, is a `SlotMemory`'s: at once on a CPU,
by events between the processes on GPUs. Files are anonymous (`memfd_create`), handed over as `/proc/PID/fd/N`: they
have no name that could stay behind, and go with the last process that maps them, however it ends.

Who waits for the other side sleeps until it is notified (`Notifier`), and learns of its death at once. Nothing is ever
left to a device that waits for another process: a wait is this process's, with its deadline.

A counter is written after what it stands for. x86 keeps that order for readers; where a machine does not, a torn
message has a wrong checksum and the sync fails.
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
from hybridflow.sync.payload import Payload
from hybridflow.sync.transports.base import DONE, Endpoint, Work

_PAGE = 4096
# int64 places in the header, a cache line apart: each is written by one side
_WRITTEN, _TAKEN, _SENDER_LEFT, _RECEIVER_LEFT, _LABELS = 0, 8, 16, 24, 32
_SPIN_S = 5e-5  # going to sleep and being woken costs about as much
_SETTLE_S = 2e-4  # between two looks at a device, which notifies nobody
_LOOK_S = 0.1  # longest sleep: a session that is given up by another thread of this process wakes nobody


class Slots(Protocol):
    """The slots of a pair, seen from one side."""

    def at(self, slot: int, nbytes: int) -> Payload:
        """So much of a slot; the same object as long as the slot's memory is the same."""

    def hand_over(self, slot: int) -> None:
        """What this side has started on the slot comes before what the other side does with it."""

    def is_ready(self, slot: int) -> bool:
        """Whether what the other side had started, before it handed the slot over last, is done."""

    def close(self) -> None:
        """Let go of the memory; twice is safe."""


class SlotMemory(Protocol):
    """Where the slots of a session lie: one for each end of a session."""

    def file_bytes(self, endpoint: Endpoint) -> int:
        """Bytes of a pair's file behind its counters."""

    def offer(self, member: Member, peer: int) -> Any:
        """What the other side needs for the slots shared with it (JSON-able)."""

    def open(self, member: Member, peer: int, offered: Any, file: torch.Tensor) -> Slots:
        """The slots shared with a peer, from what it has offered.

        Args:
            file: uint8, what both sides see of the pair's file behind its counters.
        """


def make_pipes() -> list[int]:
    """Descriptors of the two pipes of a pair: what the sender reads and writes, what the receiver reads and writes."""
    (sender_reads, receiver_writes), (receiver_reads, sender_writes) = (
        os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)
    )
    return [sender_reads, sender_writes, receiver_reads, receiver_writes]


def open_pipes(process: int, receiver: Sequence[int]) -> tuple[int, int]:
    """The receiver's two descriptors, opened by its own process. Raises OSError if the sender's process does not let
    it."""
    reads = os.open(f"/proc/{process}/fd/{receiver[0]}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return reads, os.open(f"/proc/{process}/fd/{receiver[1]}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        os.close(reads)
        raise


class Notifier:
    """One side's way to wake the other, which waits for the shared memory to change: a pipe in each direction, watched
    together with the other's process.

    A sleep would be too long for a wait of microseconds and too short for one of seconds. A pipe can be opened by
    another process through `/proc/PID/fd/N`, which an eventfd cannot. It owns its two descriptors.
    """

    def __init__(self, reads: int, writes: int, watch: PeerWatch) -> None:
        self._fds = [reads, writes]
        # a session may be given up by another thread: a closed number may be another file's by then
        self._lock = threading.Lock()
        self._watch = watch
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)
        if watch.fd >= 0:
            self._poll.register(watch.fd, select.POLLIN)

    def notify(self) -> None:
        """Wake the other side, now or when it next waits."""
        # full: it will wake anyway; broken: nobody is there
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            if self._fds:
                os.write(self._fds[1], b"\0")

    def wait(self, is_ready: Callable[[], bool], deadline: float) -> bool:
        """Whether it `is_ready`; returns when the other side notifies or its process has ended, and before the
        `deadline` (monotonic)."""
        if _spin(is_ready):
            return True
        self._poll.poll(min(max(deadline - time.monotonic(), 0), _LOOK_S) * 1000)
        with self._lock, suppress(BlockingIOError):
            if self._fds:
                os.read(self._fds[0], 1 << 16)
        return is_ready()

    def close(self) -> None:
        """Let go of the pipes; twice is safe."""
        with self._lock:
            fds, self._fds = self._fds, []
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
    """One pair's counters and slots, seen from one side."""

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
        self._member, self._peer, self._watch, self._notifier = member, peer, watch, notifier
        endpoint, header = member.endpoint, header_bytes(member.endpoint)
        size = header + memory.file_bytes(endpoint)
        file = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self._header = file[:header].view(torch.int64).numpy()
        self._num_slots, self._slot_bytes = endpoint.slots, slot_bytes(endpoint)
        self._slots = memory.open(member, peer, offered, file[header:])
        self._mine, self._theirs = (
            (_SENDER_LEFT, _RECEIVER_LEFT) if member.side == "trainer" else (_RECEIVER_LEFT, _SENDER_LEFT)
        )
        self.count = 0  # messages that this side has written or begun to read
        self._before = 0  # the count at the last rewind

    def free_slot(self, tag: int, nbytes: int) -> Payload:
        """Where the next message goes, once the receiver has taken what lay there."""
        if nbytes > self._slot_bytes:
            what = f"a message of {nbytes} bytes does not fit into a slot of {self._slot_bytes}"
            raise self._member.failure(self._peer, tag, what)
        slot, taken = self.count % self._num_slots, max(self._before, self.count - self._num_slots + 1)
        self._wait(tag, lambda: int(self._header[_TAKEN]) >= taken)
        if taken > 0:
            self._settle(tag, slot)
        return self._slots.at(slot, nbytes)

    def publish(self, tag: int, nbytes: int) -> None:
        """Show the message in `free_slot` to the receiver."""
        slot = self.count % self._num_slots
        self._slots.hand_over(slot)
        label = _LABELS + 2 * slot
        self._header[label], self._header[label + 1] = tag, nbytes
        self.count += 1
        self._header[_WRITTEN] = self.count
        self._notifier.notify()

    def message(self, tag: int, nbytes: int) -> Payload:
        """The next message, once it is there."""
        slot = self.count % self._num_slots
        self._wait(tag, lambda: int(self._header[_WRITTEN]) > self.count)
        self._settle(tag, slot)
        label = _LABELS + 2 * slot
        found = (int(self._header[label]), int(self._header[label + 1]))
        if found != (tag, nbytes):
            what = (
                f"{nbytes} bytes were expected, message {found[0]} of {found[1]} bytes came; the two sides have "
                "different plans"
            )
            raise self._member.failure(self._peer, tag, what)
        payload = self._slots.at(slot, nbytes)
        self.count += 1
        return payload

    def take(self) -> None:
        """Give the slot of the oldest `message` that still has one back to the sender."""
        self._slots.hand_over(int(self._header[_TAKEN]) % self._num_slots)
        self._header[_TAKEN] += 1
        self._notifier.notify()

    def rewind(self) -> None:
        """Leave slots out up to the first one. The sender waits there until all that it wrote before has been taken."""
        self._before = self.count
        self.count = -(-self.count // self._num_slots) * self._num_slots
        if self._mine == _RECEIVER_LEFT:
            self._header[_TAKEN] = self.count

    def leave(self) -> None:
        """Tell the other side that nothing more will happen here."""
        self._header[self._mine] = 1
        self._notifier.notify()
        self._notifier.close()
        self._watch.close()
        self._slots.close()

    def _settle(self, tag: int, slot: int) -> None:
        """Return when what the other side had started on a slot is done. This process waits, and not its device: a
        device that waits for a process that has ended waits for ever."""
        deadline = time.monotonic() + self._member.endpoint.timeout_s
        while not self._slots.is_ready(slot):
            ended = self._watch.has_ended()
            if self._header[self._mine]:  # looked at last: who gives a session up lets go of the peer after it
                raise self._member.failure(self._peer, tag, "the session was given up meanwhile")
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
            ended, left = self._watch.has_ended(), bool(self._header[self._theirs])
            if self._header[self._mine]:
                raise self._member.failure(self._peer, tag, "the session was given up meanwhile")
            if (ended or left) and not is_ready():  # it may have done its part just before
                raise self._member.lost(
                    self._peer, tag, "its process has ended" if ended else "it has closed the session"
                )
            if time.monotonic() > deadline:
                raise self._member.late(self._peer, tag)


class _End:
    """What both ends do with their segments."""

    member: Member
    _segments: dict[int, _Segment]

    def _segment(self, peer: int, tag: int) -> _Segment:
        segment = self._segments.get(peer)
        if segment is None:
            raise self.member.failure(peer, tag, "the session was given up before, or has no such rank")
        return segment

    def rewind(self) -> None:
        for segment in self._segments.values():
            segment.rewind()

    def close(self) -> None:
        """What was sent can still be received."""
        self.abort()

    def abort(self) -> None:
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.leave()


class Sender(_End):
    """A trainer rank's end."""

    def __init__(self, member: Member, memory: SlotMemory) -> None:
        self.member = member
        # of each receiver: its segment, the sender's ends of the pipes, the receiver's
        fds = {
            peer: [os.memfd_create(f"hybridflow-{member.rank}-{peer}", os.MFD_CLOEXEC), *make_pipes()]
            for peer in member.peers
        }
        self._segments = {}
        try:
            for segment, *_ in fds.values():
                os.ftruncate(segment, header_bytes(member.endpoint) + memory.file_bytes(member.endpoint))
            segments = {peer: (each[0], *each[3:]) for peer, each in fds.items()}
            meeting = meet(member, segments=segments, offers=_offers(member, memory))
            watches = _watches(member, meeting)
            # the receivers open the files by our process's number: they must stay open until then
            _wait_for_maps(member, meeting)
            for peer, each in fds.items():
                notifier = Notifier(each.pop(1), each.pop(1), watches[peer])
                offered = meeting.peers[peer]["offers"][str(member.rank)]
                self._segments[peer] = _Segment(member, peer, each[0], memory, offered, watches[peer], notifier)
        finally:
            for fd in (fd for each in fds.values() for fd in each):
                os.close(fd)

    def lend(self, peer: int, tag: int, nbytes: int) -> Payload:
        """Return memory for the next message, once it is free."""
        return self._segment(peer, tag).free_slot(tag, nbytes)

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Returns when the payload lies in a slot."""
        segment = self._segment(peer, tag)
        slot = segment.free_slot(tag, payload.nbytes)
        if slot is not payload:
            slot.tensor.copy_(payload.tensor)
        segment.publish(tag, payload.nbytes)
        return DONE


class Receiver(_End):
    """An engine rank's end."""

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
                    self._segments[peer] = _Segment(member, peer, fd, memory, offered, watches[peer], notifier)
                finally:
                    os.close(fd)
            except OSError as error:
                what = f"its memory cannot be opened ({error}); both need one user, or use the transport p2p"
                raise member.failure(peer, 0, what) from error
        meeting.store.set(f"mapped/{member.rank}", "")

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """The copy is made by `wait`."""
        arrival = _Arrival(self, self._segment(peer, tag), peer, tag, into)
        self._pending[peer].append(arrival)
        return arrival

    @property
    def slots(self) -> int:
        """Messages of one peer that can be on loan at a time."""
        return self.member.endpoint.slots

    def borrow(self, peer: int, tag: int, nbytes: int) -> SlotLoan:
        """Return the next message of a peer, once it is there."""
        segment = self._segment(peer, tag)
        return SlotLoan(segment.message(tag, nbytes), segment)

    def take_up_to(self, arrival: _Arrival) -> None:
        """Complete what was asked of a peer before, and then this."""
        pending = self._pending[arrival.peer]
        while not arrival.is_done:
            pending[0].copy()
            pending.pop(0)


def end_of(member: Member) -> type[Sender] | type[Receiver]:
    """The class of a rank's end."""
    return Sender if member.side == "trainer" else Receiver


class SlotLoan:
    """A message that lies in a slot until it is released."""

    def __init__(self, payload: Payload, segment: _Segment) -> None:
        self.payload = payload
        self._segment = segment

    def release(self) -> None:
        """Let the sender use the memory again."""
        self._segment.take()


class _Arrival:
    def __init__(self, receiver: Receiver, segment: _Segment, peer: int, tag: int, into: Payload) -> None:
        self.peer, self.is_done = peer, False
        self._receiver, self._segment, self._tag, self._into = receiver, segment, tag, into

    def wait(self) -> None:
        self._receiver.take_up_to(self)

    def copy(self) -> None:
        self._into.tensor.copy_(self._segment.message(self._tag, self._into.nbytes).tensor)
        self._segment.take()
        self.is_done = True


def slot_bytes(endpoint: Endpoint) -> int:
    """Bytes of one slot. Pages that no message reaches are never backed by memory."""
    return -(-endpoint.message_bytes // _PAGE) * _PAGE


def header_bytes(endpoint: Endpoint) -> int:
    """Bytes of the counters, and of tag and size of the message in each slot."""
    return -(-8 * (_LABELS + 2 * endpoint.slots) // _PAGE) * _PAGE


def _offers(member: Member, memory: SlotMemory) -> dict[int, Any]:
    return {peer: memory.offer(member, peer) for peer in member.peers}


def _watches(member: Member, meeting: Meeting) -> dict[int, PeerWatch]:
    watches = {peer: PeerWatch(said) for peer, said in meeting.peers.items()}
    for peer, watch in watches.items():
        if not watch.is_local:
            raise member.failure(
                peer, 0, "the two ranks are not on one host (or in one process namespace); use the transport p2p"
            )
    return watches


def _wait_for_maps(member: Member, meeting: Meeting) -> None:
    keys = [f"mapped/{peer}" for peer in member.peers]
    try:
        meeting.store.wait(keys, timedelta(seconds=member.endpoint.timeout_s))
    except StoreError as error:
        missing = [int(key.rpartition("/")[2]) for key in error.missing] if isinstance(error, StoreLate) else []
        raise WeightSyncError(
            f"session {member.endpoint.session}: engine ranks {missing} did not map the memory of trainer rank "
            f"{member.rank} within {member.endpoint.timeout_s:g} s; look at their logs"
        ) from error
