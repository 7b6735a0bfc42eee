"""Point-to-point messages over a process group of the session's own: gloo between CPU buffers, NCCL between GPU
buffers.

The group is a bare one, made from the session's store: nothing of `torch.distributed`'s global state is read or
changed, so the same process may have Megatron's groups or SGLang's. NCCL pairs by order and ignores tags; both sides go
through messages in one order anyway.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import WeightSyncError
from hybridflow.sync.payload import Payload
from hybridflow.sync.transports.base import Endpoint, Work
from hybridflow.sync.transports.meeting import Meeting, Peers, Seat, meet
from hybridflow.sync.transports.pacing import connections_unpaced


def open_sender(endpoint: Endpoint, rank: int, device: torch.device) -> PeerToPeer:
    """See `transports.open_sender`."""
    return PeerToPeer(Seat(endpoint, "trainer", rank), device)


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device) -> PeerToPeer:
    """See `transports.open_receiver`."""
    return PeerToPeer(Seat(endpoint, "engine", rank), device)


class PeerToPeer:
    """Either end: trainer ranks come first in the group, engine ranks after them."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.seat = seat
        meeting = meet(seat)
        endpoint = seat.endpoint
        self._place = {rank: number for number, rank in enumerate(endpoint.receivers, start=len(endpoint.senders))}
        if seat.side == "engine":
            self._place = {rank: number for number, rank in enumerate(endpoint.senders)}
        mine = (
            endpoint.senders.index(seat.rank)
            if seat.side == "trainer"
            else len(endpoint.senders) + endpoint.receivers.index(seat.rank)
        )
        self.peers = Peers(seat, meeting)
        try:
            self._group = _group(endpoint, meeting, mine, device)
        except RuntimeError as error:
            raise self._unopened(error) from error

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """See `SendChannel.send`."""
        return self._start("send", peer, tag, payload)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """See `ReceiveChannel.receive`."""
        return self._start("recv", peer, tag, into)

    def _start(self, method: str, peer: int, tag: int, payload: Payload) -> Work:
        if self._group is None:
            raise self.seat.failure(peer, tag, "the session was given up before")
        try:
            return _Transfer(self, peer, tag, getattr(self._group, method)([payload.tensor], self._place[peer], tag))
        except RuntimeError as error:
            raise self.peers.lost(peer, tag, _first_line(error)) from error

    def _unopened(self, error: RuntimeError) -> WeightSyncError:
        """The error for a group that did not come about."""
        seat, reason = self.seat, _first_line(error)
        if ended := self.peers.ended():
            return seat.failure(
                ended[0], 0, f"the session could not be opened, because that rank's process has ended ({reason})"
            )
        return WeightSyncError(
            f"session {seat.endpoint.session}, {seat.side} rank {seat.rank}: no process group with {seat.peer_side} "
            f"ranks "
            f"{list(seat.peers)} within {seat.endpoint.timeout_s:g} s: {reason}; look at the logs of those ranks"
        )

    def close(self) -> None:
        """See `SendChannel.close`."""
        self._group = None  # its destructor closes the sockets
        self.peers.forget()

    def abort(self) -> None:
        """See `SendChannel.abort`."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self.peers.forget()


class _Transfer:
    def __init__(self, channel: PeerToPeer, peer: int, tag: int, work: Any) -> None:
        self._channel, self._peer, self._tag, self._work = channel, peer, tag, work

    def wait(self) -> None:
        seat = self._channel.seat
        try:
            self._work.wait(timedelta(seconds=seat.endpoint.timeout_s))
        except RuntimeError as error:
            reason = _first_line(error).lower()
            if "timed out" in reason or "timeout" in reason:
                raise seat.late(self._peer, self._tag) from error
            raise self._channel.peers.lost(self._peer, self._tag, _first_line(error)) from error


def _group(endpoint: Endpoint, meeting: Meeting, rank: int, device: torch.device) -> Any:
    import torch.distributed as dist

    store = dist.PrefixStore("group", meeting.store)
    size, timeout = len(endpoint.senders) + len(endpoint.receivers), timedelta(seconds=endpoint.timeout_s)
    if Platform(device.type).collective_backend == "nccl":  # type: ignore[arg-type]
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    # by default gloo listens at the address of the host's name
    is_loopback = endpoint.host in ("localhost", "::1") or endpoint.host.startswith("127.")
    gloo._devices = [
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if is_loopback
        else dist.ProcessGroupGloo.create_default_device()
    ]
    with connections_unpaced():
        return dist.ProcessGroupGloo(store, rank, size, gloo)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip()
