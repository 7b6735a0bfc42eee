"""An eight-byte checksum behind every message.

CPU payloads: xxh3 (its speed is that of reading memory). Payloads on a GPU: a sum of mixed words, computed there. Both ends of a session
have payloads of one kind, so they use the same function. The seed holds who sends what to whom and in which sync, so a message that is
whole but stands in another's place is caught as well. This guards against faults, not against attackers.
"""

from __future__ import annotations

import struct

import torch
import xxhash

TRAILER = 8  # bytes
_CHUNK = 1 << 17  # words; bounds the memory of the digest on a device
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # splitmix64's constants


def seed_of(sync: int, sender: int, receiver: int, bucket: int) -> int:
    """64 bits that differ for every message of a session."""
    return xxhash.xxh3_64_intdigest(struct.pack("<4q", sync, sender, receiver, bucket))


def seal(payload: torch.Tensor, seed: int) -> None:
    """Write the checksum of all but the last eight bytes of `payload` (uint8 `[n + 8]`) into those."""
    body, trailer = payload[:-TRAILER], payload[-TRAILER:]
    if payload.device.type == "cpu":
        struct.pack_into("<Q", trailer.numpy().data, 0, xxhash.xxh3_64_intdigest(body.numpy().data, seed))
    else:
        trailer.copy_(device_digest(body, seed).view(torch.uint8))


def is_sealed(payload: torch.Tensor, seed: int) -> bool:
    """Whether the last eight bytes of `payload` are the checksum of the others."""
    body, trailer = payload[:-TRAILER], payload[-TRAILER:]
    if payload.device.type == "cpu":
        found: int = struct.unpack_from("<Q", trailer.numpy().data)[0]
        return found == xxhash.xxh3_64_intdigest(body.numpy().data, seed)
    return bool(torch.equal(device_digest(body, seed).view(torch.uint8), trailer))


def device_digest(body: torch.Tensor, seed: int) -> torch.Tensor:
    """Sum modulo 2^64 of mix(word XOR key of its position): int64 `[1]` on the body's device, nothing is waited for.

    For a given position mix is a bijection, so one changed word always changes the sum; several cancel out with probability 2^-64.
    """
    whole = body.numel() // 8 * 8
    total = torch.zeros(1, dtype=torch.int64, device=body.device)
    rest = torch.zeros(8, dtype=torch.uint8, device=body.device)
    rest[: body.numel() - whole] = body[whole:]
    words = body[:whole].view(torch.int64) if body.data_ptr() % 8 == 0 else body[:whole].clone().view(torch.int64)
    position = 0
    for part in (*words.split(_CHUNK), rest.view(torch.int64)):
        key = torch.arange(position + 1, position + 1 + len(part), device=body.device) * _signed(_ODD) + _signed(seed)
        total += _mixed(part ^ _mixed(key)).sum()
        position += len(part)
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    # torch's >> keeps the sign: the mask makes it a logical shift, without which this were no bijection
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _signed(_MIX)
    return words ^ ((words >> 27) & ((1 << 37) - 1))


def _signed(value: int) -> int:
    return (value ^ (1 << 63)) - (1 << 63)
