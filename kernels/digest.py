"""An eight-byte checksum that reads memory once: the sum modulo 2^64 of mix(word XOR the key of the
word's position).

Words are eight bytes long; the remaining bytes form a last word, padded with zeros. For a given
position, mix is a bijection, so a single changed word always changes the sum. Several changes
cancel out with probability 2^-64. The sum does not depend on the order of summation. The checksum
protects against faults, not against attackers.
"""

from __future__ import annotations

import torch

from hybridflow_kernels import INTERPRETED, TRITON, uses_triton

WORD = 8  # bytes
_CHUNK = 1 << 17  # words; limits the memory of the torch implementation
# words per program of the kernel, and per iteration of its loop
BLOCK, STEP = (64, 32) if INTERPRETED else (4096, 1024)
# constants of splitmix64
ODD = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


def digest(body: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the checksum as int64 `[1]` on the body's device, without synchronising.

    Args:
        body: uint8 `[n]`.
        seed: 64 bits.

    Raises:
        ValueError: `body` is not uint8, not one-dimensional, or not contiguous.
    """
    if body.dim() != 1 or body.dtype != torch.uint8 or not body.is_contiguous():
        raise ValueError(
            f"body is {body.dtype} {tuple(body.shape)}, strides {body.stride()}; expected "
            "contiguous bytes"
        )
    whole = body.numel() // 8 * 8
    aligned = body.storage_offset() % 8 == 0 and body.data_ptr() % 8 == 0
    words = (body[:whole] if aligned else body[:whole].clone()).view(torch.int64)
    if uses_triton(body):
        sums = body.new_empty(len(words) // BLOCK + 1, dtype=torch.int64)
        rest = body[whole:]
        count = body.numel() - whole
        # a sender thread starts with the first GPU as its current device
        with torch.cuda.device_of(body):
            _digest_kernel[(len(sums),)](
                words,
                rest,
                sums,
                len(words),
                count,
                signed(seed),
                BLOCK,
                STEP,
                signed(STEP * ODD % (1 << 64)),
            )
        return sums.sum(0, keepdim=True)
    total = torch.zeros(1, dtype=torch.int64, device=body.device)
    rest = torch.zeros(8, dtype=torch.uint8, device=body.device)
    rest[: body.numel() - whole] = body[whole:]
    position = 0
    for part in (*words.split(_CHUNK), rest.view(torch.int64)):
        key = torch.arange(position + 1, position + 1 + len(part), device=body.device) * signed(
            ODD
        ) + signed(seed)
        total += _mixed(part ^ _mixed(key)).sum()
        position += len(part)
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    # torch's >> is arithmetic; the mask makes it a logical shift, without which this would not be a
    # bijection
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * signed(_MIX)
    return words ^ ((words >> 27) & ((1 << 37) - 1))


def signed(value: int) -> int:
    """Convert an unsigned 64-bit value to the signed integer that torch and kernels use."""
    return (value ^ (1 << 63)) - (1 << 63)


if TRITON:
    import triton
    import triton.language as tl

    _KERNEL_ODD = tl.constexpr(signed(ODD))
    _KERNEL_MIX = tl.constexpr(signed(_MIX))

    @triton.jit
    def kernel_mixed(words):  # type: ignore[no-untyped-def]
        """Compute the same as `_mixed` in a kernel."""
        words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _KERNEL_MIX
        return words ^ ((words >> 27) & ((1 << 37) - 1))

    @triton.jit
    def kernel_word(word, position, seed):  # type: ignore[no-untyped-def]
        """Return the contributions of the words at these positions to the checksum."""
        return kernel_mixed(word ^ kernel_mixed(kernel_key(position, seed)))

    @triton.jit
    def kernel_key(position, seed):  # type: ignore[no-untyped-def]
        """Return the value that is mixed to obtain a position's key. It increases by _KERNEL_ODD
        per position."""
        return (position + 1) * _KERNEL_ODD + seed.to(tl.int64)

    @triton.jit
    def kernel_tail(body, begin, end):  # type: ignore[no-untyped-def]
        """Return the last, incomplete word: the bytes of `body` from `begin` to `end`, padded to
        eight bytes with zeros."""
        byte = tl.arange(0, 8)
        some = tl.load(body + begin + byte, mask=begin + byte < end, other=0)
        return tl.sum(some.to(tl.int64) << (8 * byte))

    @triton.jit(do_not_specialize=["num_words", "rest_bytes", "seed"])
    def _digest_kernel(  # type: ignore[no-untyped-def]
        words,
        rest,
        sums,
        num_words,
        rest_bytes,
        seed,
        BLOCK: tl.constexpr,
        STEP: tl.constexpr,
        KEYS: tl.constexpr,
    ):
        """Sum the contributions of BLOCK words. The last program sums fewer words, and adds the
        word formed from the remaining bytes."""
        program = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, STEP)
        first = program * BLOCK
        key = kernel_key(first + lane, seed)
        total = tl.zeros((STEP,), dtype=tl.int64)
        if first + BLOCK <= num_words:
            for start in tl.static_range(0, BLOCK, STEP):
                total += kernel_mixed(tl.load(words + first + start + lane) ^ kernel_mixed(key))
                key += KEYS
            tl.store(sums + program, tl.sum(total))
        else:
            for start in range(0, BLOCK, STEP):
                position = first + start + lane
                word = tl.load(words + position, mask=position < num_words, other=0)
                total += tl.where(position < num_words, kernel_mixed(word ^ kernel_mixed(key)), 0)
                key += KEYS
            last = kernel_word(kernel_tail(rest, 0, rest_bytes), num_words.to(tl.int64), seed)
            tl.store(sums + program, tl.sum(total) + last)
