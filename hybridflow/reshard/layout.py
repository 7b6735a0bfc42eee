"""Columnar layouts of both sides: for each rank and buffer, the rectangles of HF tensors stored in
it.

Ranks with the same contents share a `RankLayout` (a *class* of ranks). For example, 2,048 Megatron
ranks have 512 distinct layouts, and 1,024 ranks of 32 equal engines have 32. Shapes have three
dimensions, left-padded with ones (`padded`), so that a rectangle of an HF matrix and its position
in a stack of experts `[expert, row, column]` differ only by an offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models import Family
from hybridflow.models.fp8 import FP8, BlockQuantisation
from hybridflow.models.layout import Coordinates, LocalTensor

DIMS = 3
PADDING = -1  # tensor index of elements that the loader zero-fills
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


# Padding by number of dimensions, precomputed for the loop over all pieces of a model.
_ZEROS = [(0,) * (DIMS - n) for n in range(DIMS + 1)]
_ONES = [(1,) * (DIMS - n) for n in range(DIMS + 1)]


def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Return `values` as three entries. Shorter sequences are left-padded with `fill`. The last
    dimensions of longer sequences (a convolution's kernel) are merged into one.

    Args:
        fill: 1 for a shape or size, 0 for a start.

    Raises:
        WeightSyncError: a start within the merged dimensions, which a plan cannot express.
    """
    if len(values) <= DIMS:
        return (*((fill,) * (DIMS - len(values))), *values)
    merged = values[DIMS - 1 :]
    if fill == 0 and any(merged):
        raise WeightSyncError(
            f"a tensor of more than {DIMS} dimensions is split in one of its last dimensions, at "
            f"{tuple(values)}; a slice plan does not support this"
        )
    return (*values[: DIMS - 1], prod(merged) if fill else 0)


def columns_of(table: Any) -> dict[str, Any]:
    """Convert the arrays and tuples of a dataclass to JSON-able lists."""
    columns: dict[str, Any] = {}
    for name, column in vars(table).items():
        columns[name] = column.tolist() if isinstance(column, np.ndarray) else list(column)
    return columns


def _matrix(rows: Sequence[Sequence[int]], columns: int) -> np.ndarray:
    """Return rows of integers as a table `[N, columns]`, which may be empty."""
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


def _shape_matrix(shapes: Iterable[Sequence[int]]) -> np.ndarray:
    """Return shapes as a table `[N, 3]`, padded with ones."""
    return _matrix([padded(shape, 1) for shape in shapes], DIMS)


@dataclass(frozen=True)
class Catalog:
    """The HF tensors that both sides refer to: names and shapes `[T, 3]`.

    `scales` `[S, 4]` has one row per tensor that some engine loads in block-wise fp8: (tensor
    index, index of its scales, rows per block, columns per block). The scales are also tensors in
    the catalog.
    """

    names: tuple[str, ...]
    shapes: np.ndarray
    scales: np.ndarray = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))

    @classmethod
    def of(
        cls, tensors: Mapping[str, Sequence[int]], quantisation: BlockQuantisation | None = None
    ) -> Catalog:
        """Build a catalog from {HF name: shape}. With a quantisation, each covered tensor is
        followed by its scales."""
        shapes: Mapping[str, Sequence[int]] = tensors
        pairs: list[tuple[int, ...]] = []
        if quantisation is not None:
            shapes, dtypes = quantisation.checkpoint(tensors)
            # scales directly follow their tensor
            pairs = []
            for position, name in enumerate(shapes):
                if dtypes.get(name) == FP8:
                    pairs.append((position, position + 1, *quantisation.block))
        return cls(tuple(shapes), _shape_matrix(shapes.values()), _matrix(pairs, 4))

    def index(self) -> dict[str, int]:
        """Return {name: position}."""
        return {name: position for position, name in enumerate(self.names)}

    def part(self, first: int) -> Catalog:
        """Return a catalog of the tensors with index `first` and higher, without scales."""
        return Catalog(self.names[first:], self.shapes[first:])


@dataclass(frozen=True)
class RankLayout:
    """The buffers of a class of ranks and the pieces of HF tensors in them.

    Attributes:
        names, dtypes, shapes: the buffers; shapes is `[B, 3]`.
        tensor: `[N]` catalog index of each piece, or PADDING.
        start, size: `[N, 3]` the piece, in coordinates of the HF tensor.
        buffer: `[N]` index of the buffer that contains the piece.
        local: `[N, 3]` start of the piece within the buffer.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    size: np.ndarray
    buffer: np.ndarray
    local: np.ndarray

    @classmethod
    def of(
        cls, tensors: Sequence[LocalTensor], catalog: Mapping[str, int], dtype: str
    ) -> RankLayout:
        """Build the layout of a rank that stores these local tensors.

        Raises:
            WeightSyncError: a piece refers to a tensor missing from the catalog, or a buffer
                appears twice.
        """
        rows: list[tuple[int, ...]] = []
        try:
            for number, local in enumerate(tensors):
                for piece in local.pieces:
                    source = piece.source_start
                    size = piece.shape
                    place = piece.local_start
                    if len(size) > DIMS:
                        source = padded(source, 0)
                        size = padded(size, 1)
                        place = padded(place, 0)
                    rows.append((
                        catalog[piece.source],
                        *(*_ZEROS[len(source)], *source),
                        *(*_ONES[len(size)], *size),
                        number,
                        *(*_ZEROS[len(place)], *place),
                    ))  # fmt: skip
                if local.padding_rows:
                    height, *widths = local.shape
                    first = height - local.padding_rows
                    start = padded((first, *((0,) * len(widths))), 0)
                    extent = padded((local.padding_rows, *widths), 1)
                    rows.append((PADDING, *start, *extent, number, *start))
        except KeyError:
            raise WeightSyncError(
                f"{local.name} is filled from {piece.source}, which is not in the checkpoint"
            ) from None
        names = tuple(local.name for local in tensors)
        if len(set(names)) != len(names):
            raise WeightSyncError(
                "duplicate buffers in a rank's layout: "
                f"{sorted({n for n in names if names.count(n) > 1})[:4]}"
            )
        dtypes = [local.dtype or dtype for local in tensors]
        return cls.of_rows(names, dtypes, [local.shape for local in tensors], rows)

    @classmethod
    def of_rows(
        cls,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        rows: Sequence[tuple[int, ...]],
    ) -> RankLayout:
        """Build a layout from buffers and a table of pieces.

        Args:
            names, dtypes, shapes: the buffers.
            rows: one tuple per piece: catalog index of its tensor or PADDING, start and size in the
                tensor, index of the buffer, and start in the buffer.
        """
        table = _matrix(rows, 2 + 3 * DIMS)
        return cls(
            tuple(names),
            tuple(dtypes),
            _shape_matrix(shapes),
            table[:, 0],
            table[:, 1:4],
            table[:, 4:7],
            table[:, 7],
            table[:, 8:11],
        )

    def part(self, first: int) -> RankLayout:
        """Return the layout of the buffers that contain tensors with catalog index `first` and
        higher, for use with `Catalog.part`. These buffers must not contain any other tensors.
        """
        kept = np.unique(self.buffer[self.tensor >= first])
        number = np.full(len(self.names), -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        rows = np.isin(self.buffer, kept)
        tensor = self.tensor[rows]
        return RankLayout(
            tuple(self.names[index] for index in kept),
            tuple(self.dtypes[index] for index in kept),
            self.shapes[kept],
            np.where(tensor == PADDING, PADDING, tensor - first),
            self.start[rows],
            self.size[rows],
            number[self.buffer[rows]],
            self.local[rows],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as JSON-able data."""
        return columns_of(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankLayout:
        """Rebuild a layout from `to_dict`."""
        names = tuple(data["names"])
        dtypes = tuple(data["dtypes"])
        columns = {}
        for name in ("shapes", "start", "size", "local"):
            columns[name] = _matrix(data[name], DIMS)
        for name in ("tensor", "buffer"):
            columns[name] = np.array(data[name], dtype=np.int64)
        return cls(names=names, dtypes=dtypes, **columns)


@dataclass(frozen=True)
class Layout:
    """Layout of one side (trainer or engines).

    Attributes:
        classes: the distinct rank layouts.
        rank_class: `[R]` class of each rank.
        replica: `[R]` replica (engine) of each rank.
    """

    classes: tuple[RankLayout, ...]
    rank_class: np.ndarray
    replica: np.ndarray

    @property
    def num_ranks(self) -> int:
        """Number of ranks on this side."""
        return len(self.rank_class)

    def ranks_per_class(self) -> np.ndarray:
        """Return the number of ranks `[C]` of each class."""
        return np.bincount(self.rank_class, minlength=len(self.classes))

    def dtypes(self) -> set[str]:
        """Return the dtypes of all buffers."""
        return {dtype for rank in self.classes for dtype in rank.dtypes}

    def part(self, first: int) -> Layout:
        """Apply `RankLayout.part` to all ranks."""
        classes = tuple(rank.part(first) for rank in self.classes)
        return Layout(classes, self.rank_class, self.replica)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON-able data."""
        classes = [rank.to_dict() for rank in self.classes]
        return {
            "classes": classes,
            "rank_class": self.rank_class.tolist(),
            "replica": self.replica.tolist(),
        }


def rank_tensors(family: Family, at: Coordinates) -> list[LocalTensor]:
    """Return all parameters of a rank.

    With virtual pipeline stages, names have the prefix `chunk0.`, `chunk1.`, ... (Megatron's list
    of models).
    """
    if at.vpp_size == 1:
        return family.local_tensors(at)
    chunks = enumerate(at.virtual_stages())
    tensors: list[LocalTensor] = []
    for number, chunk in chunks:
        for local in family.local_tensors(chunk):
            tensors.append(replace(local, name=f"chunk{number}.{local.name}"))
    return tensors


def megatron_layout(
    family: Family,
    ranks: Sequence[Coordinates],
    dtype: str,
    catalog: Catalog | None = None,
    further: Callable[[list[LocalTensor]], list[LocalTensor]] = lambda _: [],
) -> Layout:
    """Build the trainer's layout by evaluating the family's parameter map at every rank.

    Args:
        further: function from a rank's parameters to the additional tensors that the rank sends.

    Raises:
        ModelError: the family does not support these parallel sizes.
    """
    index = (catalog or Catalog.of(family.tensors())).index()
    distinct = {at: number for number, at in enumerate(dict.fromkeys(ranks))}
    classes = []
    for at in distinct:
        tensors = rank_tensors(family, at)
        classes.append(RankLayout.of([*tensors, *further(tensors)], index, dtype))
    rank_class = np.array([distinct[at] for at in ranks], dtype=np.int64)
    return Layout(tuple(classes), rank_class, np.zeros(len(ranks), dtype=np.int64))
