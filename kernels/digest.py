"""A checksum of eight bytes, of memory that is read once: the sum modulo 2^64 of mix(word XOR key of its position).

The words are those of eight bytes, and one of what is left behind them, filled with zeros. For a given position mix is
a bijection, so one changed word always changes the sum; several cancel out with probability 2^-64. The sum does not
depend on the order in which it is taken. It guards against faults, not against attackers.
"""

from __future__ import annotations

import torch

from hybridflow_kernels import INTERPRETED, TRITON, uses_triton

WORD = 8  # bytes
_CHUNK = 1 << 17  # words; bounds the memory of the torch form
BLOCK, STEP = (64, 32) if INTERPRETED else (4096, 1024)  # words of a program of the kernel, and of a turn of its loop
ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # splitmix64's constants


def digest(body: torch.Tensor, seed: int) -> torch.Tensor:
    """int64 `[1]` on the body's device; nothing is waited for.

    Args:
        body: uint8 `[n]`.
        seed: 64 bits.

    Raises:
        ValueError: another dtype, another number of dimensions, or memory that is not contiguous.
    """
    if body.dim() != 1 or body.dtype != torch.uint8 or not body.is_contiguous():
        raise ValueError(f"body is {body.dtype} {tuple(body.shape)}, strides {body.stride()}; give bytes in a row")
    whole = body.numel() // 8 * 8
    aligned = body.storage_offset() % 8 == 0 and body.data_ptr() % 8 == 0
    words = (body[:whole] if aligned else body[:whole].clone()).view(torch.int64)
    if uses_triton(body):
        sums = body.new_empty(len(words) // BLOCK + 1, dtype=torch.int64)
        rest, count = body[whole:], body.numel() - whole
        with torch.cuda.device_of(body):  # a thread that sends begins with the first GPU
            _digest_kernel[(len(sums),)](
                words, rest, sums, len(words), count, signed(seed), BLOCK, STEP, signed(STEP * ODD % (1 << 64))
            )
        return sums.sum(0, keepdim=True)
    total = torch.zeros(1, dtype=torch.int64, device=body.device)
    rest = torch.zeros(8, dtype=torch.uint8, device=body.device)
    rest[: body.numel() - whole] = body[whole:]
    position = 0
    for part in (*words.split(_CHUNK), rest.view(torch.int64)):
        key = torch.arange(position + 1, position + 1 + len(part), device=body.device) * signed(ODD) + signed(seed)
        total += _mixed(part ^ _mixed(key)).sum()
        position += len(part)
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    # torch's >> keeps the sign: the mask makes it a logical shift, without which this were no bijection
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * signed(_MIX)
    return words ^ ((words >> 27) & ((1 << 37) - 1))


def signed(value: int) -> int:
    """64 bits as torch's and a kernel's integers have them."""
    return (value ^ (1 << 63)) - (1 << 63)


if TRITON:
    import triton
    import triton.language as tl

    _KERNEL_ODD, _KERNEL_MIX = tl.constexpr(signed(ODD)), tl.constexpr(signed(_MIX))

    @triton.jit
    def kernel_mixed(words):  # type: ignore[no-untyped-def]
        """`_mixed` in a kernel."""
        words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _KERNEL_MIX
        return words ^ ((words >> 27) & ((1 << 37) - 1))

    @triton.jit
    def kernel_word(word, position, seed):  # type: ignore[no-untyped-def]
        """What the words at these positions add to the checksum."""
        return kernel_mixed(word ^ kernel_mixed(kernel_key(position, seed)))

    @triton.jit
    def kernel_key(position, seed):  # type: ignore[no-untyped-def]
        """What the key of this position is mixed from; that of the next position is _KERNEL_ODD more."""
        return (position + 1) * _KERNEL_ODD + seed.to(tl.int64)

    @triton.jit
    def kernel_tail(body, begin, end):  # type: ignore[no-untyped-def]
        """The word of the fewer than eight bytes of `body` from `begin` to `end`, filled with zeros."""
        byte = tl.arange(0, 8)
        some = tl.load(body + begin + byte, mask=begin + byte < end, other=0)
        return tl.sum(some.to(tl.int64) << (8 * byte))

    @triton.jit(do_not_specialize=["num_words", "rest_bytes", "seed"])
    def _digest_kernel(  # type: ignore[no-untyped-def]
        words, rest, sums, num_words, rest_bytes, seed, BLOCK: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr
    ):
        """The sum over BLOCK words. The last program has fewer, and the word of what is left behind them."""
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
