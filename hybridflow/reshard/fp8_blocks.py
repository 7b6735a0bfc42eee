"""Block-wise fp8 in plans: determines which fp8 weights and scales a trainer rank can compute from
its own weights.

A rank whose region of `X.weight` consists of whole blocks can also provide the same region in fp8
and the matching rectangle of `X.weight_scale_inv`. That rectangle is a separate piece, in a buffer
that exists only in the plan. A sender computes both from whole blocks while packing, so its output
equals the corresponding part of the quantised whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8, SCALE_SUFFIX
from hybridflow.reshard.layout import PADDING, Catalog, Layout, RankLayout

Array = np.ndarray
SCALE_DTYPE = "float32"
WEIGHTS = "weights"
SCALES = "scales"


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of a sender's buffer, `[start : start + size]`, and the output computed from
    them.

    `makes` is WEIGHTS (fp8) or SCALES (float32). Only the last blocks of a tensor may be smaller
    than `block` (rows, columns).
    """

    makes: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    block: tuple[int, int]


@dataclass(frozen=True)
class Quantised:
    """Columnar description of a catalog's fp8 tensors.

    Attributes:
        scale_of: `[T]` index of each weight's scales, or -1.
        weight_of: `[T]` index of each scale tensor's weights, or -1.
        block: `[T, 3]` block sizes of weights and scales.
    """

    scale_of: Array
    weight_of: Array
    block: Array

    @classmethod
    def of(cls, catalog: Catalog) -> Quantised:
        """Build the columns from the catalog's `scales`."""
        scale_of, weight_of = (np.full(len(catalog.names), -1, dtype=np.int64) for _ in range(2))
        block = np.ones_like(catalog.shapes)
        weight = catalog.scales[:, 0]
        scale = catalog.scales[:, 1]
        scale_of[weight], weight_of[scale] = scale, weight
        block[weight, 1:] = block[scale, 1:] = catalog.scales[:, 2:]
        return cls(scale_of, weight_of, block)

    def weight_rows(self, tensor: Array) -> Array:
        """Return, in ascending order, the indices of the piece-table rows that hold weights with
        scales. `tensor` is the table's `tensor` column."""
        return np.flatnonzero((tensor != PADDING) & (self.scale_of[tensor] >= 0))

    def scale_rows(self, tensor: Array) -> Array:
        """Return, in ascending order, the indices of the piece-table rows that hold scales."""
        return np.flatnonzero((tensor != PADDING) & (self.weight_of[tensor] >= 0))


def enclosing(start: Array, size: Array, block: Array, full: Array) -> tuple[Array, Array]:
    """Extend rectangles of tensors of shape `full` to whole blocks. Returns (start, size). All
    arrays are `[N, 3]`."""
    first = start // block * block
    return first, np.minimum(-(-(start + size) // block) * block, full) - first


def blocks_of_scales(start: Array, size: Array, block: Array, full: Array) -> tuple[Array, Array]:
    """Return (start, size) of the weights that rectangles of scales cover. `full` is the weights'
    shape."""
    return start * block, np.minimum((start + size) * block, full) - start * block


def with_scales(source: Layout, catalog: Catalog) -> Layout:
    """Extend the trainer's layout with the scales that it can compute.

    In each class, the k-th scale piece contains the scales of the k-th quantised weight piece.

    Raises:
        WeightSyncError: a rank's piece cuts through a block.
    """
    if not len(catalog.scales):
        return source
    table = Quantised.of(catalog)
    classes = []
    for number, rank in enumerate(source.classes):
        mine = table.weight_rows(rank.tensor)
        start = rank.start[mine]
        size = rank.size[mine]
        tensor = rank.tensor[mine]
        block = table.block[tensor]
        whole_start, whole_size = enclosing(start, size, block, catalog.shapes[tensor])
        cut = np.flatnonzero(((whole_start != start) | (whole_size != size)).any(axis=1))
        if len(cut):
            _refuse_cut(
                catalog,
                rank,
                int(mine[cut[0]]),
                int(np.flatnonzero(source.rank_class == number)[0]),
                block[cut[0]],
            )
        classes.append(
            _extended(rank, mine, table.scale_of[tensor], start // block, -(-size // block))
        )
    return replace(source, classes=tuple(classes))


def _extended(
    rank: RankLayout, weights: Array, scale: Array, start: Array, size: Array
) -> RankLayout:
    count = len(rank.names)
    pieces = []
    for b, row in zip(rank.buffer[weights].tolist(), weights.tolist(), strict=True):
        pieces.append(f"{rank.names[b]}{SCALE_SUFFIX}:{row}")
    names = tuple(pieces)
    return RankLayout(
        (*rank.names, *names),
        (*rank.dtypes, *([SCALE_DTYPE] * len(names))),
        np.concatenate([rank.shapes, size]),
        np.concatenate([rank.tensor, scale]),
        np.concatenate([rank.start, start]),
        np.concatenate([rank.size, size]),
        np.concatenate([rank.buffer, count + np.arange(len(names), dtype=np.int64)]),
        np.concatenate([rank.local, np.zeros_like(start)]),
    )


def _refuse_cut(
    catalog: Catalog, rank: RankLayout, row: int, first_rank: int, block: Array
) -> None:
    low = rank.start[row, 1:].tolist()
    high = (rank.start[row] + rank.size[row])[1:].tolist()
    name = catalog.names[int(rank.tensor[row])]
    full = catalog.shapes[int(rank.tensor[row]), 1:].tolist()
    raise WeightSyncError(
        f"trainer rank {first_rank} holds [{low[0]}:{high[0]}, {low[1]}:{high[1]}] of {name} "
        f"{full} in one piece ({rank.names[int(rank.buffer[row])]}), which cuts through an fp8 "
        f"block of {int(block[1])} x {int(block[2])}, so no rank could compute its scale alone. "
        "Set actor.parallel.tensor (or expert_tensor) so that the rows and columns per rank and "
        "per head are multiples of the block, add the module to "
        "quantization_config.modules_to_not_convert, or serve in bfloat16"
    )


def made_by_sender(
    catalog: Catalog, layout: RankLayout, piece: Array, start: Array, size: Array, dtypes: list[str]
) -> dict[int, tuple[int, tuple[int, ...], Blocks]]:
    """Find a rank's deliveries that must be computed from blocks.

    Args:
        piece: `[N]` index of each delivery's source among the layout's pieces.
        start, size: `[N, 3]` the slices, in coordinates of the HF tensor.
        dtypes: `N` wire dtypes.

    Returns:
        {row: (piece to read, slice start within the computed output, blocks)}.
    """
    if not len(catalog.scales):
        return {}
    table = Quantised.of(catalog)
    tensor = layout.tensor[piece]
    is_scale = table.weight_of[tensor] >= 0
    # the k-th scale piece belongs to the k-th piece with scales (`with_scales`)
    weight_rows = table.weight_rows(layout.tensor)
    scale_rows = table.scale_rows(layout.tensor)
    read = piece.copy()
    read[is_scale] = weight_rows[np.searchsorted(scale_rows, piece[is_scale])]
    block = table.block[tensor]
    full = catalog.shapes[layout.tensor[read]]
    first, extent = (
        np.where(is_scale[:, None], a, b)
        for a, b in zip(
            blocks_of_scales(start, size, block, full),
            enclosing(start, size, block, full),
            strict=True,
        )
    )
    place = layout.local[read] + first - layout.start[read]
    inside = np.where(is_scale[:, None], 0, start - first)
    quantised: dict[int, tuple[int, tuple[int, ...], Blocks]] = {}
    for n, dtype in enumerate(dtypes):
        if dtype == FP8 or is_scale[n]:
            blocks = Blocks(
                SCALES if is_scale[n] else WEIGHTS,
                tuple(place[n].tolist()),
                tuple(extent[n].tolist()),
                (int(block[n, 1]), int(block[n, 2])),
            )
            quantised[n] = (int(read[n]), tuple(inside[n].tolist()), blocks)
    return quantised
