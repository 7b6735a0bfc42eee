"""Message transport through memory mapped by both sender and receiver, for CPU buffers of engines
on the trainer's host.

Uses the protocol of `sync.lending`. A pair's slots are in its file.
"""

from __future__ import annotations

import torch

from hybridflow.sync.lending import Receiver, Sender, end_of, slot_bytes
from hybridflow.sync.meeting import Member, both_ends, refuse_device
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, Payload, Transport


def _open(member: Member, device: torch.device) -> Sender | Receiver:
    refuse_device(member, device, "use cuda_ipc on one host, or p2p")
    return end_of(member)(member, HostMemory())


class HostMemory:
    """Slots in the pair's file. Pages that are never written are not backed by memory."""

    def file_bytes(self, endpoint: Endpoint) -> int:
        """Return the total size of all slots in bytes."""
        return endpoint.slots * slot_bytes(endpoint)

    def offer(self, member: Member, peer: int) -> None:
        """Return None, because the file contains everything that the other side needs."""

    def open(self, member: Member, peer: int, offered: None, file: torch.Tensor) -> _HostSlots:
        """Open the slots in the file."""
        size = slot_bytes(member.endpoint)
        return _HostSlots([file[n * size :][:size] for n in range(member.endpoint.slots)])


class _HostSlots:
    def __init__(self, slots: list[torch.Tensor]) -> None:
        self._slots = slots
        self._payloads: dict[tuple[int, int], Payload] = {}

    def at(self, slot: int, nbytes: int) -> Payload:
        place = (slot, nbytes)
        if place not in self._payloads:
            self._payloads[place] = Payload(self._slots[slot][:nbytes])
        return self._payloads[place]

    def hand_over(self, slot: int) -> None:
        """Do nothing, because work on a CPU completes immediately."""

    def is_ready(self, slot: int) -> bool:
        return True

    def close(self) -> None:
        """Do nothing, because the memory is unmapped with the last view."""


TRANSPORTS.register(
    "shared_memory", Transport(*both_ends(_open), one_host=True, keeps_messages=True)
)
