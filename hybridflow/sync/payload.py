"""Message bytes that both torch and Python's socket calls can access, and an eight-byte checksum
per message.

CPU payloads use xxh3, which runs at memory bandwidth. GPU payloads use a sum of mixed words,
computed on the device. Both ends of a session have payloads of the same kind, so they use the same
function. The seed encodes sender, receiver, tag and sync, so an intact message in the wrong place
is detected as well. The checksums protect against faults, not against attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from hybridflow.device.residency import memory_of
from hybridflow_kernels.digest import digest as device_digest


class Payload:
    """Memory from which a message is sent or into which it is received. Created once and reused in
    every sync of a session.

    Attributes:
        tensor: uint8 `[n]`, contiguous.
        nbytes: n.
        on_host: True if it is CPU memory.
        memory: writable view of the same bytes, valid while the tensor exists; empty on a GPU.
    """

    __slots__ = ("memory", "nbytes", "on_host", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.on_host = tensor.is_cpu
        # a payload may be a parameter that is offloaded between two syncs
        self.memory = memory_of(tensor) if tensor.is_cpu else memoryview(b"")


DIGEST_BYTES = 8
Digest = int | torch.Tensor  # an int for a CPU payload; int64 `[1]` on the device for a GPU payload


def message_key(sender: int, receiver: int, tag: int) -> int:
    """Return a 64-bit key that is unique among the messages of a sync."""
    return xxhash.xxh3_64_intdigest(struct.pack("<3q", sender, receiver, tag))


def seeds_of(keys: Sequence[int], sync: int) -> list[int]:
    """Return a 64-bit seed per message of a sync, distinct from the seeds of other syncs."""
    mask = xxhash.xxh3_64_intdigest(struct.pack("<q", sync))
    return [key ^ mask for key in keys]


def digest(payload: Payload, seed: int) -> Digest:
    """Return the checksum of a payload. On a GPU this does not synchronise."""
    return (
        xxhash.xxh3_64_intdigest(payload.memory, seed)
        if payload.on_host
        else device_digest(payload.tensor, seed)
    )


def joined(digests: Sequence[Digest], device: torch.device) -> torch.Tensor:
    """Concatenate checksums as bytes, uint8 `[8 * n]` on the payloads' device."""
    if device.type == "cpu":
        words = torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))
    else:
        words = torch.cat([word for word in digests if isinstance(word, torch.Tensor)])
    return words.view(torch.uint8)


def first_difference(digests: Sequence[Digest], sent: torch.Tensor) -> int | None:
    """Return the index of the first checksum that differs from `sent`, or None if all are equal.

    `sent` is the `joined` result of the other end.
    """
    wrong = (joined(digests, sent.device).view(torch.int64) != sent.view(torch.int64)).nonzero()
    return int(wrong[0]) if len(wrong) else None
