"""The bytes of a message, as torch and as Python's own calls see them, and an eight-byte checksum of every message.

Checksums of CPU payloads are xxh3 (its speed is that of reading memory), those of payloads on a GPU a sum of mixed
words, computed there. Both ends of a session have payloads of one kind, so they use the same function. The seed holds
who sends what to whom and in which sync, so a message that is whole but stands in another's place is caught as well.
This guards against faults, not against attackers.
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
    """Memory that a message is sent from or received into: made once, used in every sync of a session.

    Attributes:
        tensor: uint8 `[n]`, contiguous.
        nbytes: n.
        on_host: whether it is CPU memory.
        memory: the same bytes then, writable, valid as long as the tensor; empty on a GPU.
    """

    __slots__ = ("memory", "nbytes", "on_host", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.nbytes, self.on_host = tensor, tensor.numel(), tensor.is_cpu
        # a payload may be a parameter that is offloaded between two syncs
        self.memory = memory_of(tensor) if tensor.is_cpu else memoryview(b"")


DIGEST_BYTES = 8
Digest = int | torch.Tensor  # of a CPU payload; of one on a GPU: int64 `[1]` there


def message_key(sender: int, receiver: int, tag: int) -> int:
    """64 bits that differ for every message of a sync."""
    return xxhash.xxh3_64_intdigest(struct.pack("<3q", sender, receiver, tag))


def seeds_of(keys: Sequence[int], sync: int) -> list[int]:
    """64 bits for each message of a sync that no message of another sync has."""
    mask = xxhash.xxh3_64_intdigest(struct.pack("<q", sync))
    return [key ^ mask for key in keys]


def digest(payload: Payload, seed: int) -> Digest:
    """The checksum of a payload; on a GPU nothing is waited for."""
    return xxhash.xxh3_64_intdigest(payload.memory, seed) if payload.on_host else device_digest(payload.tensor, seed)


def joined(digests: Sequence[Digest], device: torch.device) -> torch.Tensor:
    """Checksums as bytes, uint8 `[8 * n]` on the payloads' device."""
    if device.type == "cpu":
        words = torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))
    else:
        words = torch.cat([word for word in digests if isinstance(word, torch.Tensor)])
    return words.view(torch.uint8)


def first_difference(digests: Sequence[Digest], sent: torch.Tensor) -> int | None:
    """Number of the first checksum that is not the one in `sent`, which the other end has `joined`; None: all are
    equal."""
    wrong = (joined(digests, sent.device).view(torch.int64) != sent.view(torch.int64)).nonzero()
    return int(wrong[0]) if len(wrong) else None
