"""Point-to-point messages over a process group of the session's own: gloo between CPU buffers, NCCL between GPU
buffers.

The group is a bare one, made from the session's store: nothing of `torch.distributed`'s global state is read or
changed, so the same process may have Megatron's groups or SGLang's. NCCL pairs by order and ignores tags; both sides go
through messages in one order anyway.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import WeightSyncError
from hybridflow.process.torch_store import TorchStore
from hybridflow.sync.meeting import Member, Peers, meet
from hybridflow.sync.payload import Payload
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, Transport, Work

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_POLL_S = 0.001


def open_sender(endpoint: Endpoint, rank: int, device: torch.device) -> PeerToPeer:
    """Open trainer rank `rank`'s end of the session."""
    return PeerToPeer(Member(endpoint, "trainer", rank), device)


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device) -> PeerToPeer:
    """Open engine rank `rank`'s end of the session."""
    return PeerToPeer(Member(endpoint, "engine", rank), device)


class PeerToPeer:
    """Either end: trainer ranks come first in the group, engine ranks after them."""

    def __init__(self, member: Member, device: torch.device) -> None:
        self.member = member
        meeting = meet(member)
        endpoint = member.endpoint
        self._place = {rank: number for number, rank in enumerate(endpoint.receivers, start=len(endpoint.senders))}
        if member.side == "engine":
            self._place = {rank: number for number, rank in enumerate(endpoint.senders)}
        mine = (
            endpoint.senders.index(member.rank)
            if member.side == "trainer"
            else len(endpoint.senders) + endpoint.receivers.index(member.rank)
        )
        self.peers, self.is_nccl = Peers(member, meeting), _is_nccl(device)
        self._store = TorchStore(meeting.store.client, f"group/{endpoint.session}/")
        try:
            self._group = _group(endpoint, self._store, mine, device)
        except RuntimeError as error:
            raise self._unopened(error) from error

    @property
    def is_open(self) -> bool:
        """Whether the session was neither ended nor given up."""
        return self._group is not None

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending; the payload stays untouched until `wait`."""
        return self._start("send", peer, tag, payload)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Start receiving into `into`."""
        return self._start("recv", peer, tag, into)

    def _start(self, method: str, peer: int, tag: int, payload: Payload) -> Work:
        if self._group is None:
            raise self.member.failure(peer, tag, "the session was given up before")
        try:
            return _Transfer(self, peer, tag, getattr(self._group, method)([payload.tensor], self._place[peer], tag))
        except RuntimeError as error:
            raise self.peers.lost(peer, tag, _first_line(error)) from error

    def _unopened(self, error: RuntimeError) -> WeightSyncError:
        """The error for a group that did not come about."""
        member, reason = self.member, _first_line(error)
        if ended := self.peers.ended():
            return member.failure(
                ended[0], 0, f"the session could not be opened, because that rank's process has ended ({reason})"
            )
        return WeightSyncError(
            f"session {member.endpoint.session}, {member.side} rank {member.rank}: no process group with "
            f"{member.peer_side} ranks {list(member.peers)} within {member.endpoint.timeout_s:g} s: {reason}; look at "
            "the logs of those ranks"
        )

    def close(self) -> None:
        """End the session in good order."""
        self._group = None  # its destructor closes the sockets
        self._store.release()
        self.peers.forget()

    def abort(self) -> None:
        """Give the session up at once."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store.release()
        self.peers.forget()


class _Transfer:
    def __init__(self, channel: PeerToPeer, peer: int, tag: int, work: Any) -> None:
        self._channel, self._peer, self._tag, self._work = channel, peer, tag, work

    def wait(self) -> None:
        member = self._channel.member
        try:
            if self._channel.is_nccl:
                self._wait_for_the_device()
                self._work.wait()  # the current stream goes on after the transfer
            else:
                self._work.wait(timedelta(seconds=member.endpoint.timeout_s))
        except RuntimeError as error:
            reason = _first_line(error).lower()
            if "timed out" in reason or "timeout" in reason:
                raise member.late(self._peer, self._tag) from error
            raise self._channel.peers.lost(self._peer, self._tag, _first_line(error)) from error

    def _wait_for_the_device(self) -> None:
        """Poll: NCCL's own deadline would end this process, a dead peer leaves its kernels spinning, and a transfer
        that `abort` ended looks like one that went well."""
        channel, deadline = self._channel, time.monotonic() + self._channel.member.endpoint.timeout_s
        while not (done := self._work.is_completed()) and channel.is_open and time.monotonic() < deadline:
            if ended := channel.peers.ended_now():
                raise channel.member.lost(ended[0], self._tag)
            time.sleep(_POLL_S)
        if not channel.is_open:
            raise channel.member.failure(self._peer, self._tag, "the session was given up before")
        if not done:
            raise channel.member.late(self._peer, self._tag)


def _group(endpoint: Endpoint, store: TorchStore, rank: int, device: torch.device) -> Any:
    import torch.distributed as dist

    size, timeout = len(endpoint.senders) + len(endpoint.receivers), timedelta(seconds=endpoint.timeout_s)
    if _is_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=30)  # a watchdog that finds a transfer overdue ends the process
        before = os.environ.get(_NCCL_ERRORS)
        os.environ[_NCCL_ERRORS] = "0"  # read by the constructor: errors are reported to whoever waits, and end nothing
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ.pop(_NCCL_ERRORS)
            os.environ |= {} if before is None else {_NCCL_ERRORS: before}
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    # by default gloo listens at the address of the host's name
    is_loopback = endpoint.host in ("localhost", "::1") or endpoint.host.startswith("127.")
    gloo._devices = [
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if is_loopback
        else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _is_nccl(device: torch.device) -> bool:
    return Platform(device.type).collective_backend == "nccl"  # type: ignore[arg-type]


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip()


# over gloo larger messages: it hands each to a thread of its own and asks the receiver before it
TRANSPORTS.register("p2p", Transport(open_sender, open_receiver, devices=("cpu", "cuda"), parts=4))
