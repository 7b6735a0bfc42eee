"""Message transport through GPU memory shared by two processes on a node, and over NCCL between
nodes.

Uses the protocol of `sync.lending`, like shared memory on CPUs. A slot is memory on the sender's
GPU, exported once per session when its first message is sent. The receiver copies from the slot
into its parameters, because their memory cannot be exported. Each side records an event after its
work on a slot, and the other side queries that event. The transport supports a trainer and engines
that share GPUs, which NCCL rejects, and any two GPUs of a node.

If an engine's ranks or its senders are on several nodes, pairs within a node use slots and other
pairs use a process group (`p2p`). NCCL connects only those pairs of the group that exchange
messages, and therefore never two processes on one GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybridflow.device import peer_memory
from hybridflow.errors import WeightSyncError
from hybridflow.sync.lending import end_of, slot_bytes
from hybridflow.sync.meeting import Meeting, Member, both_ends, meet
from hybridflow.sync.transports import p2p
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, Payload, Transport, Work

_NOTE_BYTES = 4096  # bytes per slot in the pair's file for the handle that opens its memory
_LEAST = 1 << 16


def _open(member: Member, device: torch.device) -> Any:
    if device.type != "cuda":
        raise WeightSyncError(
            f"transport {member.endpoint.transport} requires GPU buffers, but the buffers of "
            f"{member.side} rank {member.rank} are on {device}; use shared_memory"
        )

    def open_near(near: Member) -> Any:
        return end_of(near)(near, DeviceMemory(device, peer_memory))

    return join_nodes(member, open_near, lambda: p2p.open_end(member, device))


def join_nodes(member: Member, near: Callable[[Member], Any], far: Callable[[], Any]) -> Any:
    """Open a rank's channel with `near`, which connects the ranks of one node, with `far`, which
    connects all ranks, or with both."""
    endpoint = member.endpoint
    meeting = meet(member)
    sides = {"trainer": endpoint.senders, "engine": endpoint.receivers}
    kernels = {side: _kernels(meeting, side, ranks) for side, ranks in sides.items()}
    distinct = {*kernels["trainer"].values(), *kernels["engine"].values()}
    kernel = "" if len(distinct) == 1 else kernels[member.side][member.rank]
    neighbour = replace(member, endpoint=_part(endpoint, kernels, kernel))
    if not kernel:
        return near(neighbour)
    close = frozenset(neighbour.peers)
    channel = near(neighbour) if close else None
    try:
        return _Joined(channel, far(), close)
    except BaseException:
        if channel is not None:
            channel.abort()
        raise


class _Joined:
    """Either end of a session over several nodes. Routes each message to the channel that reaches
    its peer."""

    def __init__(self, near: Any, far: Any, close: frozenset[int]) -> None:
        self._near = near
        self._far = far
        self._close = close

    def _channel(self, peer: int) -> Any:
        return self._near if peer in self._close else self._far

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        return self._channel(peer).send(peer, tag, payload)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        return self._channel(peer).receive(peer, tag, into)

    def close(self) -> None:
        for channel in filter(None, (self._near, self._far)):
            channel.close()

    def abort(self) -> None:
        for channel in filter(None, (self._near, self._far)):
            channel.abort()


class DeviceMemory:
    """Slots in the sender's GPU memory.

    Args:
        device: device of this process.
        peer: `device.peer_memory`, or a substitute.
    """

    def __init__(self, device: torch.device, peer: Any) -> None:
        self._device = device
        self._peer = peer
        self._events: dict[int, Any] = {}

    def file_bytes(self, endpoint: Endpoint) -> int:
        """Return the number of bytes needed for the handles of the slots' memory."""
        return endpoint.slots * _NOTE_BYTES

    def offer(self, member: Member, peer: int) -> Any:
        """Create this side's events, one per slot, and return their handles."""
        self._events[peer] = self._peer.Events(member.endpoint.slots, self._device)
        return self._events[peer].handles

    def open(self, member: Member, peer: int, offered: Any, file: torch.Tensor) -> _DeviceSlots:
        """Open the pair's slots. No memory has been allocated for them yet."""
        mine = self._events.pop(peer)
        theirs = self._peer.PeerEvents(offered, self._device)
        return _DeviceSlots(member, self._device, self._peer, file, mine, theirs)


class _DeviceSlots:
    """One side of a pair.

    The sender writes the handle of each slot's memory to the file. Memory is allocated when a
    message first needs it and at least doubles in size each time, so a pair with small messages
    uses little memory.
    """

    def __init__(
        self,
        member: Member,
        device: torch.device,
        peer: Any,
        file: torch.Tensor,
        mine: Any,
        theirs: Any,
    ):
        self._device = device
        self._peer = peer
        self._mine = mine
        self._theirs = theirs
        self._is_sender = member.side == "trainer"
        self._most = slot_bytes(member.endpoint)
        self._notes = []
        for slot in range(member.endpoint.slots):
            note = file.narrow(0, slot * _NOTE_BYTES, _NOTE_BYTES)
            self._notes.append(note.numpy())
        self._memory: dict[int, tuple[str, torch.Tensor]] = {}
        self._payloads: dict[tuple[int, int], Payload] = {}
        self._is_open = True

    def at(self, slot: int, nbytes: int) -> Payload:
        if slot not in self._memory or self._memory[slot][1].numel() < nbytes:
            for place in list(self._payloads):
                if place[0] == slot:
                    del self._payloads[place]
            self._memory.pop(slot, None)
            if self._is_sender:
                self._memory[slot] = self._export(slot, nbytes)
            else:
                self._memory[slot] = self._import(slot)
        place = (slot, nbytes)
        if place not in self._payloads:
            _, memory = self._memory[slot]
            self._payloads[place] = Payload(memory[:nbytes])
        return self._payloads[place]

    def _export(self, slot: int, nbytes: int) -> tuple[str, torch.Tensor]:
        power_of_two = 1 << (nbytes - 1).bit_length()
        size = min(max(_LEAST, power_of_two), self._most)
        memory, text = self._peer.export(size, self._device)
        note = json.dumps(text).encode().ljust(_NOTE_BYTES)
        self._notes[slot][:] = list(note)
        return text, memory

    def _import(self, slot: int) -> tuple[str, torch.Tensor]:
        text = json.loads(bytes(self._notes[slot]))
        return text, self._peer.import_memory(text, self._device)

    def hand_over(self, slot: int) -> None:
        """Record an event after this side's pending work."""
        self._mine.record(slot)

    def is_ready(self, slot: int) -> bool:
        return self._is_open and bool(self._theirs.is_done(slot))

    def close(self) -> None:
        """Release the memory. Views of it may outlive this call."""
        if self._is_open:
            self._is_open = False
            self._memory = {}
            self._payloads = {}
            self._mine.release()


def _kernels(meeting: Meeting, side: str, ranks: tuple[int, ...]) -> dict[int, str]:
    """Return the kernel id announced by each rank of a side. All ranks must have arrived."""
    kernels: dict[int, str] = {}
    for rank in ranks:
        announced = json.loads(meeting.store.get(f"{side}/{rank}"))
        kernels[rank] = announced["kernel"]
    return kernels


def _part(endpoint: Endpoint, kernels: dict[str, dict[int, str]], kernel: str) -> Endpoint:
    """Restrict the endpoint to the ranks of one machine. An empty `kernel` selects all ranks."""

    def chosen(side: str) -> tuple[int, ...]:
        return tuple(rank for rank, where in kernels[side].items() if kernel in ("", where))

    name = hashlib.sha256(kernel.encode()).hexdigest()[:12]
    return replace(
        endpoint,
        session=f"{endpoint.session}/{name}",
        senders=chosen("trainer"),
        receivers=chosen("engine"),
    )


open_sender, open_receiver = both_ends(_open)
TRANSPORTS.register(
    "cuda_ipc", Transport(open_sender, open_receiver, devices=("cuda",), shares_devices=True)
)
