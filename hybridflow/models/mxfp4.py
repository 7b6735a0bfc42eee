"""MXFP4, the format in which gpt-oss was published: experts are stored as blocks of 32 four-bit
floats with one power-of-two scale per block.

`X_blocks` is uint8 [experts, out, in / 32, 16], two values per byte, low nibble first; `X_scales`
is uint8 [experts, out, in / 32], exponents biased by 127. They replace `X` [experts, in, out]
(transformers: `integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # imported lazily: checks of folders do not need torch

METHOD = "mxfp4"
BLOCKS = "_blocks"
SCALES = "_scales"
_GROUP = 32
_OFFSET = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Reader = Callable[[str, tuple[int, ...], tuple[int, ...]], "torch.Tensor"]


def packed_names(names: Collection[str]) -> set[str]:
    """Return the tensors that are stored as blocks and scales."""
    held = set(names)
    stems = {name.removesuffix(BLOCKS) for name in held if name.endswith(BLOCKS)}
    return {stem for stem in stems if f"{stem}{SCALES}" in held}


def read_packed(
    read: Reader, name: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a region of the tensor `name` [experts, in, out] in bfloat16, which represents every
    value exactly.

    Args:
        read: reads a region of a stored tensor.
    """
    import torch

    expert, row, column = start
    experts, rows, columns = shape
    first = row // _GROUP
    groups = -(-(row + rows) // _GROUP) - first
    at = (expert, column, first)
    size = (experts, columns, groups)
    packed = read(f"{name}{BLOCKS}", (*at, 0), (*size, _GROUP // 2))
    exponents = read(f"{name}{SCALES}", at, size).int() - _OFFSET
    positive = torch.tensor(_VALUES)
    values = torch.cat([positive, -positive])
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    found = torch.ldexp(values[halves.int()], exponents[..., None]).flatten(-2)
    offset = row - first * _GROUP
    inside = found[..., offset : offset + rows]
    return inside.transpose(1, 2).to(torch.bfloat16)
