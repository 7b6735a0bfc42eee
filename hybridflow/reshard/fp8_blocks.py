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
        scale_of = np.full(len(catalog.names), -1, dtype=np.int64)
        weight_of = np.full_like(scale_of, -1)
        block = np.ones_like(catalog.shapes)
        weight = catalog.scales[:, 0]
        scale = catalog.scales[:, 1]
        scale_of[weight] = scale
        weight_of[scale] = weight
        block[weight, 1:] = block[scale, 1:] = catalog.scales[:, 2:]
        return cls(scale_of, weight_of, block)

    def weight_rows(self, tensor: Array) -> Array:
        """Return, in ascending order, the indices of the piece-table rows that hold weights with
        scales. `tensor` is the table's `tensor` column."""
        has_scales = self.scale_of[tensor] >= 0
        return np.flatnonzero((tensor != PADDING) & has_scales)

    def scale_rows(self, tensor: Array) -> Array:
        """Return, in ascending order, the indices of the piece-table rows that hold scales."""
        is_scale = self.weight_of[tensor] >= 0
        return np.flatnonzero((tensor != PADDING) & is_scale)


def enclosing(start: Array, size: Array, block: Array, full: Array) -> tuple[Array, Array]:
    """Extend rectangles of tensors of shape `full` to whole blocks. Returns (start, size). All
    arrays are `[N, 3]`."""
    first = start // block * block
    end = -(-(start + size) // block) * block
    return first, np.minimum(end, full) - first


def blocks_of_scales(start: Array, size: Array, block: Array, full: Array) -> tuple[Array, Array]:
    """Return (start, size) of the weights that rectangles of scales cover. `full` is the weights'
    shape."""
    first = start * block
    end = (start + size) * block
    return first, np.minimum(end, full) - first


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
        is_cut = (whole_start != start) | (whole_size != size)
        cut = np.flatnonzero(is_cut.any(axis=1))
        if len(cut):
            worst = cut[0]
            first_rank = int(np.flatnonzero(source.rank_class == number)[0])
            _refuse_cut(catalog, rank, int(mine[worst]), first_rank, block[worst])
        scale = table.scale_of[tensor]
        scale_size = -(-size // block)
        classes.append(_extended(rank, mine, scale, start // block, scale_size))
    return replace(source, classes=tuple(classes))


def _extended(
    rank: RankLayout, weights: Array, scale: Array, start: Array, size: Array
) -> RankLayout:
    count = len(rank.names)
    names = list(rank.names)
    for row in weights.tolist():
        names.append(f"{rank.names[rank.buffer[row]]}{SCALE_SUFFIX}:{row}")
    dtypes = (*rank.dtypes, *([SCALE_DTYPE] * len(weights)))
    buffers = np.arange(count, len(names), dtype=np.int64)
    return RankLayout(
        tuple(names),
        dtypes,
        np.concatenate([rank.shapes, size]),
        np.concatenate([rank.tensor, scale]),
        np.concatenate([rank.start, start]),
        np.concatenate([rank.size, size]),
        np.concatenate([rank.buffer, buffers]),
        np.concatenate([rank.local, np.zeros_like(start)]),
    )


def _refuse_cut(
    catalog: Catalog, rank: RankLayout, row: int, first_rank: int, block: Array
) -> None:
    start = rank.start[row]
    _, top, left = start
    _, bottom, right = start + rank.size[row]
    tensor = rank.tensor[row]
    name = catalog.names[tensor]
    full = catalog.shapes[tensor, 1:].tolist()
    buffer = rank.names[rank.buffer[row]]
    _, rows, columns = block
    raise WeightSyncError(
        f"trainer rank {first_rank} holds [{top}:{bottom}, {left}:{right}] of {name} {full} in one "
        f"piece ({buffer}), which cuts through an fp8 block of {rows} x {columns}, so no rank "
        "could compute its scale alone. "
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
    of_scales = blocks_of_scales(start, size, block, full)
    of_weights = enclosing(start, size, block, full)
    first, extent = np.where(is_scale[:, None], of_scales, of_weights)
    place = layout.local[read] + first - layout.start[read]
    inside = np.where(is_scale[:, None], 0, start - first)
    quantised: dict[int, tuple[int, tuple[int, ...], Blocks]] = {}
    for n, dtype in enumerate(dtypes):
        if dtype == FP8 or is_scale[n]:
            makes = SCALES if is_scale[n] else WEIGHTS
            _, rows, columns = block[n].tolist()
            blocks = Blocks(
                makes, tuple(place[n].tolist()), tuple(extent[n].tolist()), (rows, columns)
            )
            quantised[n] = (int(read[n]), tuple(inside[n].tolist()), blocks)
    return quantised
