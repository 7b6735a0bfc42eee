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
BLOCK = 64 if INTERPRETED else 4096  # words of a program of the kernel
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # splitmix64's constants


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
            _digest_kernel[(len(sums),)](words, rest, sums, len(words), count, signed(seed), BLOCK)
        return sums.sum(0, keepdim=True)
    total = torch.zeros(1, dtype=torch.int64, device=body.device)
    rest = torch.zeros(8, dtype=torch.uint8, device=body.device)
    rest[: body.numel() - whole] = body[whole:]
    position = 0
    for part in (*words.split(_CHUNK), rest.view(torch.int64)):
        key = torch.arange(position + 1, position + 1 + len(part), device=body.device) * signed(_ODD) + signed(seed)
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

    _KERNEL_ODD, _KERNEL_MIX = tl.constexpr(signed(_ODD)), tl.constexpr(signed(_MIX))

    @triton.jit
    def kernel_mixed(words):  # type: ignore[no-untyped-def]
        """`_mixed` in a kernel."""
        words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _KERNEL_MIX
        return words ^ ((words >> 27) & ((1 << 37) - 1))

    @triton.jit
    def kernel_word(word, position, seed):  # type: ignore[no-untyped-def]
        """What the words at these positions add to the checksum."""
        return kernel_mixed(word ^ kernel_mixed((position + 1) * _KERNEL_ODD + seed.to(tl.int64)))

    @triton.jit(do_not_specialize=["num_words", "rest_bytes", "seed"])
    def _digest_kernel(words, rest, sums, num_words, rest_bytes, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The sum over BLOCK words; the last program has the word of what is left as well."""
        position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + position, mask=position < num_words, other=0)
        last = tl.zeros((BLOCK,), dtype=tl.int64)
        for byte in tl.static_range(8):
            here = (position == num_words) & (byte < rest_bytes)
            last += tl.load(rest + byte + position * 0, mask=here, other=0).to(tl.int64) << (8 * byte)
        word = tl.where(position == num_words, last, word)
        mixed = tl.where(position <= num_words, kernel_word(word, position, seed), 0)
        tl.store(sums + tl.program_id(0), tl.sum(mixed))
