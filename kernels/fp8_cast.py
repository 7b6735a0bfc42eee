"""Block-wise fp8, made by senders while they pack. The result for a block depends on that block's
weights alone.

scale = amax(|block|) / 448, the largest float8_e4m3fn, and weight / scale is rounded to nearest even; all in float32. A
block of zeros has scale 1. A scale is never below the least normal float32, so that nothing is divided by zero; a
weight that is not finite stays visible.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hybridflow_kernels import TRITON, uses_triton

FP8_MAX = 448.0
_LEAST = torch.finfo(torch.float32).tiny
_LARGEST_BLOCK = 1 << 15  # elements that a program of the kernel holds; larger blocks take the torch form
_STRIP = 1 << 22  # elements worked on at a time: bounds the float32 copies to 16 MiB each


def block_scales(weights: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Scales float32 `[n, ceil(r / rows), ceil(c / columns)]` of weights `[n, r, c]` that begin at a block's first row
    and column."""
    (n, r, c), (rows, columns) = weights.shape, block
    whole = pad(weights.float(), (0, -c % columns, 0, -r % rows))
    amax = whole.view(n, -(-r // rows), rows, -(-c // columns), columns).abs().amax(dim=(2, 4))
    return torch.where(amax == 0, 1.0, (amax / FP8_MAX).clamp_min(_LEAST))


def write_scales(weights: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """Write the scales of weights `[n, r, c]`, whole blocks, to `out` (float32, as `block_scales` has it)."""
    _check(weights, out, torch.float32)
    if _in_kernel(weights, block):
        _launch(weights, block, out, None, 0, 0)
        return
    step = _strip_rows(weights, block[0])
    for low in range(0, weights.shape[1], step):
        part = block_scales(weights[:, low : low + step], block)
        out[:, low // block[0] : low // block[0] + part.shape[1]] = part


def write_weights(weights: torch.Tensor, block: tuple[int, int], row: int, column: int, out: torch.Tensor) -> None:
    """Write to `out` (float8_e4m3fn `[n, r', c']`) the part from (row, column) on of the fp8 form of weights `[n, r,
    c]`, whole blocks.

    Raises:
        ValueError: another dtype than float8_e4m3fn, another device, a part that is not inside, or weights that are no
            floats.
    """
    rows, columns = block
    _check(weights, out, torch.float8_e4m3fn)
    if row + out.shape[1] > weights.shape[1] or column + out.shape[2] > weights.shape[2] or min(row, column) < 0:
        raise ValueError(
            f"{tuple(out.shape)} from ({row}, {column}) on is not inside weights of {tuple(weights.shape)}"
        )
    if _in_kernel(weights, block):
        _launch(weights, block, None, out, row, column)
        return
    last_row, last_column = row + out.shape[1], column + out.shape[2]
    step = _strip_rows(weights, rows)
    for low in range(0, weights.shape[1], step):
        strip = weights[:, low : low + step]
        first, last = max(row, low), min(last_row, low + strip.shape[1])
        if first >= last:
            continue
        scales = block_scales(strip, block).repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        inside = (slice(None), slice(first - low, last - low), slice(column, last_column))
        out[:, first - row : last - row].copy_(strip[inside].float() / scales[inside])


def _strip_rows(weights: torch.Tensor, rows: int) -> int:
    return max(_STRIP // max(weights.shape[0] * weights.shape[2], 1) // rows, 1) * rows


def _check(weights: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    if weights.dim() != 3 or not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype} {tuple(weights.shape)}; give floats [n, r, c]")
    if out.dim() != 3 or out.dtype != dtype or out.device != weights.device or len(out) != len(weights):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; {dtype} [{len(weights)}, ...] on {weights.device} "
            "is written"
        )


def _in_kernel(weights: torch.Tensor, block: tuple[int, int]) -> bool:
    return uses_triton(weights) and (1 << (block[0] - 1).bit_length() + (block[1] - 1).bit_length()) <= _LARGEST_BLOCK


def _launch(
    weights: torch.Tensor,
    block: tuple[int, int],
    scales: torch.Tensor | None,
    out: torch.Tensor | None,
    row: int,
    column: int,
) -> None:
    """Write scales, or fp8 values from (row, column) on: one program for each block that is wanted of."""
    n, r, c = weights.shape
    first = (row // block[0], column // block[1])
    height, width = (r, c) if out is None else (row + out.shape[1], column + out.shape[2])
    counts = (-(-height // block[0]) - first[0], -(-width // block[1]) - first[1])
    if not n * counts[0] * counts[1]:
        return
    target = scales if out is None else out.view(torch.uint8)
    assert target is not None
    _block_kernel[(n * counts[0] * counts[1],)](
        weights,
        target,
        r,
        c,
        *weights.stride(),
        *target.stride(),
        *first,
        *counts,
        row,
        column,
        height,
        width,
        ROWS=block[0],
        COLUMNS=block[1],
        ROWS_2=1 << (block[0] - 1).bit_length(),
        COLUMNS_2=1 << (block[1] - 1).bit_length(),
        SCALES=out is None,
        FP8_MAX=FP8_MAX,
        LEAST=_LEAST,
        num_warps=8,
    )


if TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _e4m3(x):  # type: ignore[no-untyped-def]
        """Bits of the nearest float8_e4m3fn, ties to even; what is too large is not a number.

        By integers, as the conversion of Triton's interpreter does not round to even. A normal result is the upper bits
        after a half (less one, plus the last kept bit) has been added; a subnormal one is what the addition of 2^14
        leaves in the lowest bits.
        """
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        normal = (size + ((7 - 127) << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        found = tl.where(size < (121 << 23), subnormal, normal)
        return (tl.where(size >= 0x43F00000, 0x7F, found) | sign).to(tl.uint8)

    @triton.jit
    def _block_kernel(  # type: ignore[no-untyped-def]
        weights,
        out,
        r,
        c,
        stride_n,
        stride_r,
        stride_c,
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
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS_2: tl.constexpr,
        COLUMNS_2: tl.constexpr,
        SCALES: tl.constexpr,
        FP8_MAX: tl.constexpr,
        LEAST: tl.constexpr,
    ):
        """One block: read once, its scale, and the scale or the values written."""
        program = tl.program_id(0).to(tl.int64)
        matrix = program // (count_r * count_c)
        at_r = first_r + program // count_c % count_r
        at_c = first_c + program % count_c
        in_r, in_c = tl.arange(0, ROWS_2), tl.arange(0, COLUMNS_2)
        rows, columns = at_r * ROWS + in_r, at_c * COLUMNS + in_c
        real = ((in_r < ROWS) & (rows < r))[:, None] & ((in_c < COLUMNS) & (columns < c))[None, :]
        place = weights + matrix * stride_n + rows[:, None] * stride_r + columns[None, :] * stride_c
        x = tl.load(place, mask=real, other=0.0).to(tl.float32)
        lost = x != x  # noqa: PLR0124  not a number; the maximum of a GPU leaves it out
        amax = tl.max(tl.max(tl.where(lost, 0.0, tl.abs(x)), 1), 0)
        unknown = tl.max(tl.max(lost.to(tl.int32), 1), 0)
        scale = tl.div_rn(amax, tl.full((), FP8_MAX, tl.float32))
        scale = tl.where(amax == 0.0, 1.0, tl.where(scale < LEAST, LEAST, scale))
        scale = tl.where(unknown > 0, float("nan"), scale)
        if SCALES:
            tl.store(out + matrix * out_n + at_r * out_r + at_c * out_c, scale)
        else:
            found = _e4m3(tl.div_rn(x, tl.zeros((ROWS_2, COLUMNS_2), tl.float32) + scale))
            wanted = ((rows >= row) & (rows < height))[:, None] & ((columns >= column) & (columns < width))[None, :]
            target = out + matrix * out_n + (rows - row)[:, None] * out_r + (columns - column)[None, :] * out_c
            tl.store(target, found, mask=real & wanted)
