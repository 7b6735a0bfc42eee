"""Message transport over a separate process group per session: gloo for CPU buffers, NCCL for GPU
buffers.

The group is created directly from the session's store. It neither reads nor modifies
`torch.distributed`'s global state, so it coexists with Megatron's or SGLang's groups in a process.
NCCL matches messages by order and ignores tags; both sides process messages in the same order
anyway.

**NCCL.** An NCCL kernel occupies its device until the other side's kernel runs, and kernels on one
device may share a queue even across sessions. Two senders that start messages to two engines in
different orders would deadlock. The sender therefore starts a message only after the receiver has
announced in the store that it is waiting for that message and has received all earlier ones.
Everything in a sender's queue can then complete without any other kernel being started, regardless
of the order in which engines are served. A session has one communicator. All its pairs are
connected before the first message, because NCCL connects a pair at its first message, and that call
blocks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from datetime import timedelta
from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import client_store
from hybridflow.process.store import Keys, StoreError, StoreLate
from hybridflow.process.torch_store import TorchStore
from hybridflow.sync.meeting import Member, Peers, both_ends, meet
from hybridflow.sync.transports.base import TRANSPORTS, Payload, Transport, Work

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Each engine's session is opened by a separate thread, but the constructor reads process-wide
# state. Never wait for another rank under this lock: ranks open their sessions in different orders.
_making = threading.Lock()
_POLL_S = 0.001
_LOOK_S = 0.2  # interval between checks of the peers' processes while waiting for the store
_MOST_CTAS = 8  # CTAs per communicator; a device has one communicator per engine


def open_end(member: Member, device: torch.device) -> PeerToPeer:
    """Open a rank's end of the session."""
    return OverNccl(member, device) if _is_nccl(device) else OverGloo(member, device)


class PeerToPeer:
    """Either end of a session. In the group, trainer ranks come first, followed by engine ranks."""

    def __init__(self, member: Member, device: torch.device) -> None:
        self.member = member
        self.device = device
        meeting = meet(member)
        endpoint = member.endpoint
        senders = {rank: number for number, rank in enumerate(endpoint.senders)}
        receivers = {
            rank: number for number, rank in enumerate(endpoint.receivers, start=len(senders))
        }
        own, self._place = (
            (senders, receivers) if member.side == "trainer" else (receivers, senders)
        )
        self.peers = Peers(member, meeting)
        self._store = TorchStore(meeting.store, f"group/{endpoint.session}/")
        try:
            self._group = self._join(own[member.rank], len(senders) + len(receivers))
        except RuntimeError as error:
            raise self._unopened(error) from error

    def _join(self, number: int, size: int) -> Any:
        """Create the process group of `size` ranks, in which this rank has index `number`."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """True until the session is closed or aborted."""
        return self._group is not None

    def _unopened(self, error: BaseException) -> WeightSyncError:
        """Build the error for a group that could not be created."""
        member = self.member
        reason = _first_line(error)
        if ended := self.peers.ended():
            return member.failure(
                ended[0],
                0,
                f"could not open the session because that rank's process has ended ({reason})",
            )
        return WeightSyncError(
            f"session {member.endpoint.session}, {member.side} rank {member.rank}: could not "
            f"create a process group with {member.peer_side} ranks {list(member.peers)} within "
            f"{member.endpoint.timeout_s:g} s: {reason}; see the logs of those ranks"
        )

    def close(self) -> None:
        """Close the session cleanly."""
        self._group = None  # its destructor closes the sockets
        self._store.release()
        self.peers.forget()

    def abort(self) -> None:
        """Abort the session without waiting."""
        group = self._group
        self._group = None
        if group is not None:
            group.abort()
        self.close()


class OverGloo(PeerToPeer):
    """Point-to-point channel for CPU buffers."""

    def _join(self, number: int, size: int) -> Any:
        import torch.distributed as dist

        endpoint = self.member.endpoint
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=endpoint.timeout_s)
        # by default gloo listens on the address that the host name resolves to
        is_loopback = endpoint.host in ("localhost", "::1") or endpoint.host.startswith("127.")
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            if is_loopback
            else dist.ProcessGroupGloo.create_default_device()
        ]
        return dist.ProcessGroupGloo(self._store, number, size, options)

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending. The payload must not be modified until `wait` returns."""
        return self._start("send", peer, tag, payload)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Start receiving into `into`."""
        return self._start("recv", peer, tag, into)

    def _start(self, method: str, peer: int, tag: int, payload: Payload) -> Work:
        if self._group is None:
            raise self.member.failure(peer, tag, "the session was already aborted")
        try:
            work = getattr(self._group, method)([payload.tensor], self._place[peer], tag)
        except RuntimeError as error:
            raise self.peers.lost(peer, tag, _first_line(error)) from error
        return _GlooTransfer(self, peer, tag, work)


class _GlooTransfer:
    def __init__(self, channel: OverGloo, peer: int, tag: int, work: Any) -> None:
        self._channel = channel
        self._peer = peer
        self._tag = tag
        self._work = work

    def wait(self) -> None:
        member = self._channel.member
        try:
            self._work.wait(timedelta(seconds=member.endpoint.timeout_s))
        except RuntimeError as error:
            reason = _first_line(error).lower()
            if "timed out" in reason or "timeout" in reason:
                raise member.late(self._peer, self._tag) from error
            raise self._channel.peers.lost(self._peer, self._tag, _first_line(error)) from error


class OverNccl(PeerToPeer):
    """Point-to-point channel for GPU buffers, over one communicator."""

    def __init__(self, member: Member, device: torch.device) -> None:
        super().__init__(member, device)
        endpoint = member.endpoint
        # a separate connection, because NCCL's threads use the group's
        client = client_store(endpoint.host, endpoint.port, endpoint.timeout_s)
        self._notes = Keys(client.connection, f"transport/{endpoint.session}/ready/")
        self._counts: Counter[int] = Counter()  # messages announced to, or by, each peer so far
        # half of the slots are in flight while the other half are processed
        self._together = max(1, endpoint.slots // 2)
        self._next: _Batch | None = None  # receiver only: not started yet
        # receiver only: started batches in order, the first of which has been announced
        self._started: deque[_Batch] = deque()
        self._connect()

    def _join(self, number: int, size: int) -> Any:
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        # the watchdog would kill the process when a transfer times out
        options._timeout = timedelta(days=30)
        options.config.max_ctas = _MOST_CTAS
        with _making:
            before = os.environ.get(_NCCL_ERRORS)
            # read by the constructor: report errors to the waiter instead of killing the process
            os.environ[_NCCL_ERRORS] = "0"
            try:
                return dist.ProcessGroupNCCL(self._store, number, size, options)
            finally:
                os.environ.pop(_NCCL_ERRORS)
                os.environ |= {} if before is None else {_NCCL_ERRORS: before}

    def _connect(self) -> None:
        """Create the communicator and connect all pairs by sending one byte each.

        NCCL has no timeout for either step, so a separate thread executes both while the calling
        thread waits with a deadline.
        """
        failed: list[BaseException] = []

        def connect(group: Any) -> None:
            try:
                group.eager_connect_single_device(self.device)
                byte = Payload(torch.zeros(1, dtype=torch.uint8, device=self.device))
                start = self.send if self.member.side == "trainer" else self.receive
                for peer in self.member.peers:
                    start(peer, 0, byte).wait()
            except BaseException as error:  # an exception in a thread would be lost
                failed.append(error)

        deadline = time.monotonic() + self.member.endpoint.timeout_s
        thread = threading.Thread(
            target=connect, args=(self._group,), name="connect-nccl", daemon=True
        )
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline and not self.peers.ended_now():
            thread.join(_POLL_S)
        if thread.is_alive():
            failed.append(TimeoutError("NCCL did not connect"))
        if failed:
            error = failed[0]
            if not isinstance(error, WeightSyncError):
                error = self._unopened(error)
            self.abort()
            raise error from failed[0]

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending once the receiver is waiting for this message."""
        self._wait_for_receiver(peer, tag)
        batch = _Batch([("send", payload, peer, tag)])
        self.start(batch)
        return _NcclTransfer(self, batch, peer, tag)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Register a receive. One kernel receives a batch of messages.

        It starts when the batch is full or when `wait` is called for the batch's first message.
        """
        self._next = batch = self._next or _Batch([])
        batch.parts.append(("recv", into, peer, tag))
        if len(batch.parts) == self._together:
            self._start_next()
        return _NcclTransfer(self, batch, peer, tag)

    def start(self, batch: _Batch) -> None:
        """Start the messages of a batch in NCCL, unless they have already started."""
        if batch is self._next:
            return self._start_next()
        group = self._group
        _, _, peer, tag = batch.parts[0]
        if batch.work is not None:
            return None
        if group is None:
            raise self.member.failure(peer, tag, "the session was already aborted")
        try:
            group._start_coalescing()
            for method, payload, rank, number in batch.parts:
                getattr(group, method)([payload.tensor], self._place[rank], number)
            batch.work = group._end_coalescing()
        except RuntimeError as error:
            raise self.peers.lost(peer, tag, _first_line(error)) from error

    def _start_next(self) -> None:
        batch = self._next
        self._next = None
        assert batch is not None
        self._started.append(batch)
        if self._started[0] is batch:
            # announce first: NCCL blocks on an unconnected pair until the sender arrives
            self._announce(batch)
        self.start(batch)

    def _announce(self, batch: _Batch) -> None:
        """Announce to the senders that this rank is waiting for exactly these messages."""
        for _, _, peer, tag in batch.parts:
            self._counts[peer] += 1
            try:
                self._notes.set(f"{self.member.rank}/{peer}/{self._counts[peer]}", "")
            except StoreError as error:
                raise self._without_store(peer, tag, error) from error

    def ended(self, batch: _Batch) -> None:
        """Mark a receiver's batch and all earlier ones as received, and let the senders of the next
        batch start."""
        if batch not in self._started:
            return
        while self._started.popleft() is not batch:
            pass
        if self._started:
            self._announce(self._started[0])

    def _wait_for_receiver(self, peer: int, tag: int) -> None:
        """Block until the peer is waiting for the next message from this rank."""
        key = f"{peer}/{self.member.rank}/{self._counts[peer] + 1}"
        deadline = time.monotonic()
        deadline += self.member.endpoint.timeout_s
        while True:
            if not self.is_open:
                raise self.member.failure(peer, tag, "the session was already aborted")
            try:
                self._notes.wait(
                    [key], timedelta(seconds=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
                )
                self._notes.delete_key(key)
                break
            except StoreLate:
                if ended := self.peers.ended_now():
                    raise self.member.lost(ended[0], tag) from None
                if time.monotonic() > deadline:
                    raise self.member.late(peer, tag) from None
            except StoreError as error:
                raise self._without_store(peer, tag, error) from error
        self._counts[peer] += 1

    def _without_store(self, peer: int, tag: int, error: StoreError) -> WeightSyncError:
        return self.member.failure(
            peer, tag, str(error) if self.is_open else "the session was already aborted"
        )

    def close(self) -> None:
        """Close the session cleanly."""
        super().close()
        self._notes.close()


class _Batch:
    """Messages transferred by one NCCL kernel, each as (method, payload, peer, tag)."""

    def __init__(self, parts: list[tuple[str, Payload, int, int]]) -> None:
        self.parts = parts
        self.work: Any = None


class _NcclTransfer:
    def __init__(self, channel: OverNccl, batch: _Batch, peer: int, tag: int) -> None:
        self._channel = channel
        self._batch = batch
        self._peer = peer
        self._tag = tag

    def wait(self) -> None:
        channel = self._channel
        channel.start(self._batch)
        self._wait_for_the_device()
        channel.ended(self._batch)
        try:
            self._batch.work.wait()  # the current stream waits for the transfer
        except RuntimeError as error:
            raise channel.peers.lost(self._peer, self._tag, _first_line(error)) from error

    def _wait_for_the_device(self) -> None:
        """Poll until the transfer has completed.

        Polling is needed for three reasons: NCCL's own timeout would kill this process, the kernels
        of a dead peer's transfer never finish, and a transfer stopped by `abort` appears
        successful.
        """
        channel = self._channel
        deadline = time.monotonic() + self._channel.member.endpoint.timeout_s
        while (
            not (done := self._batch.work.is_completed())
            and channel.is_open
            and time.monotonic() < deadline
        ):
            if ended := channel.peers.ended_now():
                raise channel.member.lost(ended[0], self._tag)
            time.sleep(_POLL_S)
        if not channel.is_open:
            raise channel.member.failure(self._peer, self._tag, "the session was already aborted")
        if not done:
            raise channel.member.late(self._peer, self._tag)


def _is_nccl(device: torch.device) -> bool:
    return Platform(device.type).collective_backend == "nccl"  # type: ignore[arg-type]


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].strip()


open_sender, open_receiver = both_ends(open_end)
# Larger messages suit gloo, which hands each message to another thread and performs a handshake
# with the receiver.
TRANSPORTS.register("p2p", Transport(open_sender, open_receiver, devices=("cpu", "cuda"), parts=4))
