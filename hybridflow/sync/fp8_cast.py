"""The arithmetic of block-wise fp8, done by senders while they pack. The result for a block depends on that block's
weights alone.

scale = amax(|block|) / 448, the largest float8_e4m3fn, and weight / scale is rounded to nearest even; all in float32. A
block of zeros has scale 1. A scale is never below the least normal float32, so that nothing is divided by zero; a
weight that is not finite stays visible.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

FP8_MAX = 448.0
_LEAST = torch.finfo(torch.float32).tiny
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
    step = _strip_rows(weights, block[0])
    for low in range(0, weights.shape[1], step):
        part = block_scales(weights[:, low : low + step], block)
        out[:, low // block[0] : low // block[0] + part.shape[1]] = part


def write_weights(weights: torch.Tensor, block: tuple[int, int], row: int, column: int, out: torch.Tensor) -> None:
    """Write to `out` (float8_e4m3fn `[n, r', c']`) the part from (row, column) on of the fp8 form of weights `[n, r,
    c]`, whole blocks."""
    rows, columns = block
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
