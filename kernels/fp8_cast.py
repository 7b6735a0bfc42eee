"""Block-wise fp8 quantisation by senders while packing. The result for a block depends only on the
block's weights.

scale = amax(|block|) / 448, where 448 is the largest float8_e4m3fn value. weight / scale is rounded
to nearest even. All arithmetic is float32. A block of zeros has scale 1. A scale is at least the
smallest normal float32, which prevents division by zero. If a weight is not finite, neither is the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import pad

from hybridflow_kernels import TRITON, uses_triton
from hybridflow_kernels.digest import signed

FP8_MAX = 448.0
_LEAST = torch.finfo(torch.float32).tiny
# largest block, in elements, for a program of the kernel; larger blocks use the torch
# implementation
_LARGEST_BLOCK = 1 << 15
_STRIP_ROWS = 32  # rows of a block per iteration if 16-byte accesses are not possible
_STRIP = 1 << 22  # elements processed at a time: limits each float32 copy to 16 MiB


def block_scales(weights: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return scales float32 `[n, ceil(r / rows), ceil(c / columns)]` of weights `[n, r, c]`.

    The weights must begin at a block's first row and column.
    """
    n, r, c = weights.shape
    rows, columns = block
    whole = pad(weights.float(), (0, -c % columns, 0, -r % rows))
    amax = whole.view(n, -(-r // rows), rows, -(-c // columns), columns).abs().amax(dim=(2, 4))
    # a tensor, because torch on a GPU multiplies by a number's reciprocal, which rounds differently
    scales = amax / torch.full_like(amax, FP8_MAX)
    return torch.where(amax == 0, 1.0, scales.clamp_min(_LEAST))


def write_scales(weights: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """Write the scales of `weights` to `out` (float32, see `block_scales`). The weights `[n, r, c]`
    must consist of whole blocks."""
    _check(weights, out, torch.float32)
    if in_kernel(weights, block):
        launch(weights, block, out, None)
        return
    step = _strip_rows(weights, block[0])
    for low in range(0, weights.shape[1], step):
        part = block_scales(weights[:, low : low + step], block)
        out[:, low // block[0] : low // block[0] + part.shape[1]] = part


def write_weights(
    weights: torch.Tensor, block: tuple[int, int], row: int, column: int, out: torch.Tensor
) -> None:
    """Quantise part of the weights to fp8 and write it to `out`.

    Args:
        weights: `[n, r, c]`, consisting of whole blocks.
        row, column: start of the part.
        out: float8_e4m3fn `[n, r', c']`.

    Raises:
        ValueError: `out` is not float8_e4m3fn or is on another device, the part is out of bounds,
            or the weights are not floats.
    """
    rows, columns = block
    _check(weights, out, torch.float8_e4m3fn)
    if (
        row + out.shape[1] > weights.shape[1]
        or column + out.shape[2] > weights.shape[2]
        or min(row, column) < 0
    ):
        raise ValueError(
            f"out of shape {tuple(out.shape)} at ({row}, {column}) is not inside weights of shape "
            f"{tuple(weights.shape)}"
        )
    if in_kernel(weights, block):
        launch(weights, block, None, out, (row, column))
        return
    last_row = row + out.shape[1]
    last_column = column + out.shape[2]
    step = _strip_rows(weights, rows)
    for low in range(0, weights.shape[1], step):
        strip = weights[:, low : low + step]
        first = max(row, low)
        last = min(last_row, low + strip.shape[1])
        if first >= last:
            continue
        scales = block_scales(strip, block).repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        inside = (slice(None), slice(first - low, last - low), slice(column, last_column))
        out[:, first - row : last - row].copy_(strip[inside].float() / scales[inside])


def _strip_rows(weights: torch.Tensor, rows: int) -> int:
    return max(_STRIP // max(weights.shape[0] * weights.shape[2], 1) // rows, 1) * rows


def _check(weights: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    if weights.dim() != 3 or not weights.is_floating_point():
        raise ValueError(
            f"weights are {weights.dtype} {tuple(weights.shape)}; expected floats [n, r, c]"
        )
    if (
        out.dim() != 3
        or out.dtype != dtype
        or out.device != weights.device
        or len(out) != len(weights)
    ):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; expected {dtype} "
            f"[{len(weights)}, ...] on {weights.device}"
        )


def in_kernel(weights: torch.Tensor, block: tuple[int, int]) -> bool:
    """Return True if the kernel can quantise these weights with blocks of this size."""
    return (
        uses_triton(weights)
        and (1 << (block[0] - 1).bit_length() + (block[1] - 1).bit_length()) <= _LARGEST_BLOCK
    )


@dataclass(frozen=True)
class Words:
    """Destination for the checksum (`digest`) of values that form part of a message.

    Attributes:
        sums: int64, one entry per program: the sum over its words.
        begin: offset of the values in the message, in bytes. It must be a multiple of 8, as must
            the number of columns and the block's number of columns.
        seed: seed of the message's checksum.
    """

    sums: torch.Tensor
    begin: int
    seed: int


def programs(
    weights: torch.Tensor, block: tuple[int, int], size: Sequence[int], at: tuple[int, int]
) -> int:
    """Return the number of programs that compute values of this size starting at `at`: one per
    block.
    """
    return prod((len(weights), *_counts(block, size, at)))


def _counts(block: tuple[int, int], size: Sequence[int], at: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (
        -(-(low + count) // b) - low // b for low, count, b in zip(at, size[1:], block, strict=True)
    )
    return rows, columns


def launch(
    weights: torch.Tensor,
    block: tuple[int, int],
    scales: torch.Tensor | None,
    values: torch.Tensor | None,
    at: tuple[int, int] = (0, 0),
    words: Words | None = None,
) -> int:
    """Write the scales, the fp8 values starting at row and column `at`, or both. Writing both takes
    a single read and requires that both cover all blocks.

    Returns:
        The number of programs that wrote the sums over their words to `words.sums`; 0 without
        `words`.
    """
    _, r, c = weights.shape
    size = weights.shape if values is None else values.shape
    counts = _counts(block, size, at)
    number = len(weights) * counts[0] * counts[1]
    if not number:
        return 0
    # placeholder tensors for the arguments that are not given; nothing is written to them
    some = (
        scales
        if scales is not None
        else values.view(torch.uint8)
        if values is not None
        else weights
    )
    given = some if values is None else values.view(torch.uint8)
    # Without 16-byte accesses, threads hold an address per element, so they process fewer elements.
    rows_2 = 1 << (block[0] - 1).bit_length()
    places = (*weights.stride()[:2], *given.stride()[:2], c, at[1], at[1] + size[2])
    vectors = weights.stride(2) == given.stride(2) == 1 and not any(place % 16 for place in places)
    _block_kernel[(number,)](
        weights,
        some if scales is None else scales,
        given,
        some if words is None else words.sums,
        r,
        c,
        *weights.stride(),
        *(some if scales is None else scales).stride(),
        *given.stride(),
        at[0] // block[0],
        at[1] // block[1],
        *counts,
        *at,
        at[0] + size[1],
        at[1] + size[2],
        0 if words is None else words.begin,
        0 if words is None else signed(words.seed),
        ROWS=block[0],
        COLUMNS=block[1],
        ROWS_2=rows_2,
        COLUMNS_2=1 << (block[1] - 1).bit_length(),
        STRIP=rows_2 if vectors else min(rows_2, _STRIP_ROWS),
        SCALES=scales is not None,
        VALUES=values is not None,
        DIGEST=words is not None,
        FP8_MAX=FP8_MAX,
        LEAST=_LEAST,
        num_warps=8,
    )
    return number if words is not None else 0


if TRITON:
    import triton
    import triton.language as tl

    from hybridflow_kernels.digest import kernel_word

    @triton.jit
    def _e4m3(x):  # type: ignore[no-untyped-def]
        """Return the bits of the nearest float8_e4m3fn, ties to even. Values that are too large
        become NaN.

        Uses integer arithmetic, because the conversion in Triton's interpreter does not round to
        even. A normal result is the upper bits after rounding: one half minus one, plus the last
        remaining bit, is added to the discarded bits. A subnormal result is in the lowest bits
        after adding 2^14.
        """
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        normal = (size + ((7 - 127) << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (
            141 << 23
        )
        found = tl.where(size < (121 << 23), subnormal, normal)
        return (tl.where(size >= 0x43F00000, 0x7F, found) | sign).to(tl.uint8)

    # Arguments of 1 or multiples of 16 trigger another compilation, so only those that affect
    # 16-byte alignment are specialised.
    _PLAIN = [
        "r",
        "scales_n",
        "scales_r",
        "scales_c",
        "first_r",
        "first_c",
        "count_r",
        "count_c",
        "row",
        "height",
    ]

    @triton.jit(do_not_specialize=[*_PLAIN, "begin", "seed"])
    def _block_kernel(  # type: ignore[no-untyped-def]
        weights,
        scales,
        out,
        sums,
        r,
        c,
        stride_n,
        stride_r,
        stride_c,
        scales_n,
        scales_r,
        scales_c,
        out_n,
        out_r,
        out_c,
        first_r,
        first_c,
        count_r,
        count_c,
        row,
        column,
        height,
        width,
        begin,
        seed,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS_2: tl.constexpr,
        COLUMNS_2: tl.constexpr,
        STRIP: tl.constexpr,
        SCALES: tl.constexpr,
        VALUES: tl.constexpr,
        DIGEST: tl.constexpr,
        FP8_MAX: tl.constexpr,
        LEAST: tl.constexpr,
    ):
        """Compute one block's scale, and write the scale and the values.

        The block is read once. If it spans several strips of STRIP rows, they are reread from the
        cache to compute the values.
        """
        program = tl.program_id(0).to(tl.int64)
        matrix = program // (count_r * count_c)
        at_r = first_r + program // count_c % count_r
        at_c = first_c + program % count_c
        in_c = tl.arange(0, COLUMNS_2)
        columns = at_c * COLUMNS + in_c
        has_column = (in_c < COLUMNS) & (columns < c)
        beside = columns[None, :] * stride_c
        amax = 0.0
        unknown = 0
        x = tl.zeros((STRIP, COLUMNS_2), dtype=tl.float32)
        for strip in range(0, ROWS_2, STRIP):
            in_r = strip + tl.arange(0, STRIP)
            rows = at_r * ROWS + in_r
            has_row = (in_r < ROWS) & (rows < r)
            place = weights + matrix * stride_n + rows[:, None] * stride_r + beside
            x = tl.load(place, mask=has_row[:, None] & has_column[None, :], other=0.0).to(
                tl.float32
            )
            lost = x != x  # noqa: PLR0124  NaN, which a GPU's maximum ignores
            amax = tl.maximum(amax, tl.max(tl.max(tl.where(lost, 0.0, tl.abs(x)), 1), 0))
            unknown = tl.maximum(unknown, tl.max(tl.max(lost.to(tl.int32), 1), 0))
        scale = tl.div_rn(amax, tl.full((), FP8_MAX, tl.float32))
        scale = tl.where(amax == 0.0, 1.0, tl.where(scale < LEAST, LEAST, scale))
        scale = tl.where(unknown > 0, float("nan"), scale)
        if SCALES:
            tl.store(scales + matrix * scales_n + at_r * scales_r + at_c * scales_c, scale)
        if VALUES:
            broad = has_column & (columns >= column) & (columns < width)
            total = tl.zeros((), tl.int64)
            for strip in range(0, ROWS_2, STRIP):
                in_r = strip + tl.arange(0, STRIP)
                rows = at_r * ROWS + in_r
                has_row = (in_r < ROWS) & (rows < r)
                if STRIP < ROWS_2:
                    place = weights + matrix * stride_n + rows[:, None] * stride_r + beside
                    x = tl.load(place, mask=has_row[:, None] & has_column[None, :], other=0.0).to(
                        tl.float32
                    )
                found = _e4m3(tl.div_rn(x, tl.zeros((STRIP, COLUMNS_2), tl.float32) + scale))
                tall = has_row & (rows >= row) & (rows < height)
                target = (
                    out
                    + matrix * out_n
                    + (rows - row)[:, None] * out_r
                    + (columns - column)[None, :] * out_c
                )
                tl.store(target, found, mask=tall[:, None] & broad[None, :])
                if DIGEST:
                    # rows of the message are whole words, so each word is either fully included or
                    # not at all
                    byte = tl.reshape(found, (STRIP, COLUMNS_2 // 8, 8)).to(tl.int64)
                    word = tl.sum(byte << (8 * tl.arange(0, 8))[None, None, :], axis=2)
                    in_w = 8 * tl.arange(0, COLUMNS_2 // 8)
                    across = at_c * COLUMNS + in_w
                    wanted = (
                        tall[:, None]
                        & ((in_w < COLUMNS) & (across >= column) & (across < width))[None, :]
                    )
                    offset = (
                        (matrix * (height - row) + rows[:, None] - row) * (width - column)
                        + across[None, :]
                        - column
                    )
                    total += tl.sum(
                        tl.where(wanted, kernel_word(word, (begin + offset) // 8, seed), 0)
                    )
            if DIGEST:
                tl.store(sums + program, total)
