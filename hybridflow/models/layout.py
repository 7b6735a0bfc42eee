"""Sharding of Hugging Face tensors across Megatron ranks, described as data.

A rank's local tensor is described by rectangular `Piece`s: (HF tensor, HF region) <-> (local
tensor, local region), both regions of the same shape. Elements of a local tensor that no piece
covers are padding (vocabulary rows added for tensor parallelism) and are zero. Import, export and
weight sync all use these pieces; there is no second description of the sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Self

from hybridflow.config import derived
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError


@dataclass(frozen=True)
class Piece:
    """One rectangle: `source[source_start : +shape]` of the HF tensor is `local[local_start :
    +shape]` on the rank."""

    source: str
    source_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The piece's HF region: (tensor, start, shape). Ranks with equal regions are replicas."""
        return self.source, self.source_start, self.shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that index the local region."""
        ranges = []
        for start, size in zip(self.local_start, self.shape, strict=True):
            ranges.append(slice(start, start + size))
        return tuple(ranges)


@dataclass(frozen=True)
class LocalTensor:
    """A rank's parameter: its Megatron name, local shape and the pieces that fill it.

    `dtype` is set if the tensor has a fixed precision that does not depend on the model's dtype
    ("float32" for expert biases). `is_buffer` marks a registered buffer of the module rather than a
    parameter. The last `padding_rows` rows have no source.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    is_buffer: bool = False
    padding_rows: int = 0


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank, or of one of its virtual stages (`vpp_rank`), in the Megatron layout.

    `etp` is the tensor parallelism of the experts. `first_stage_layers` and `last_stage_layers` are
    Megatron's `num_layers_in_first_pipeline_stage` and `..._last_...`; 0 means an even share.
    `layers_per_stage` lists the number of layers of every (virtual) stage in model order (`pp_size
    * vpp_size` numbers); it is empty if unset. All values are integers, so `row` can be sent as a
    single tensor.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    vpp_rank: int = 0
    vpp_size: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    layers_per_stage: tuple[int, ...] = ()

    def row(self) -> list[int]:
        """Return all values in field order, followed by the listed layers."""
        return [*(getattr(self, one.name) for one in fields(self)[:-1]), *self.layers_per_stage]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Coordinates:
        """Inverse of `row`."""
        names = [one.name for one in fields(cls)[:-1]]
        numbers: dict[str, Any] = dict(zip(names, row, strict=False))
        return cls(**numbers, layers_per_stage=tuple(row[len(names) :]))

    @property
    def is_even(self) -> bool:
        """True if every stage has an equal share of the layers."""
        return not (self.first_stage_layers or self.last_stage_layers or self.layers_per_stage)

    def chunk_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each virtual stage in model order, i.e. the first virtual
        stage of every pipeline stage, then the second of every pipeline stage, and so on. All code
        that needs a rank's layers calls this method.
        """
        if self.layers_per_stage:
            return list(self.layers_per_stage)
        return [count // self.vpp_size for count in self.stage_layers(num_layers)] * self.vpp_size

    def stage_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage, summed over its virtual stages."""
        if self.layers_per_stage:
            return [
                sum(self.layers_per_stage[stage :: self.pp_size]) for stage in range(self.pp_size)
            ]
        first = self.first_stage_layers
        last = self.last_stage_layers
        middle = self.pp_size - (first > 0) - (last > 0)
        counts = [(num_layers - first - last) // middle if middle > 0 else 0] * self.pp_size
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
        return counts

    def layers(self, num_layers: int) -> range:
        """Return the global indices of this (virtual) stage's layers.

        They are consistent with `get_transformer_layer_offset` of Megatron-Core 0.16.
        """
        counts = self.chunk_layers(num_layers)
        chunk = self.vpp_rank * self.pp_size + self.pp_rank
        start = sum(counts[:chunk])
        return range(start, start + counts[chunk])

    def experts(self, num_experts: int) -> range:
        """Return the indices of the routed experts of a layer that are on this rank, in local
        order. All code that needs a rank's experts calls this method.
        """
        share = num_experts // self.ep_size
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)

    @property
    def is_first_stage(self) -> bool:
        """True if this stage contains the embedding."""
        return self.pp_rank == 0 and self.vpp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this stage contains the final norm and the output layer."""
        return self.pp_rank == self.pp_size - 1 and self.vpp_rank == self.vpp_size - 1

    def virtual_stages(self) -> list[Coordinates]:
        """Return the coordinates of each virtual stage (model chunk) of this rank."""
        return [replace(self, vpp_rank=chunk) for chunk in range(self.vpp_size)]


@dataclass(frozen=True)
class ParallelShape:
    """Parallel sizes of a Megatron world of `ranks` processes, including data-parallel replicas.

    Checks, ranks, weight transfers and plans all derive their coordinates from it. The fields for
    layers per stage have the same meaning as in `Coordinates`.
    """

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    layers_per_stage: tuple[int, ...] = ()

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int, **extra: Any) -> Self:
        """Return the sizes specified in a configuration section. `extra` contains a subclass's
        additional fields."""
        return cls(
            ranks,
            parallel.tensor,
            parallel.pipeline,
            derived.virtual_pipeline_size(parallel),
            parallel.context,
            parallel.expert,
            derived.expert_tensor_size(parallel),
            parallel.first_stage_layers,
            parallel.last_stage_layers,
            parallel.layers_per_stage,
            **extra,
        )

    def place(
        self, tp_rank: int = 0, pp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0
    ) -> Coordinates:
        """Return the coordinates of the rank at these positions; with virtual stages, the
        coordinates of its first stage."""
        return Coordinates(
            tp_rank=tp_rank,
            tp_size=self.tensor,
            pp_rank=pp_rank,
            pp_size=self.pipeline,
            ep_rank=ep_rank,
            ep_size=self.expert,
            etp_rank=etp_rank,
            etp_size=self.expert_tensor,
            vpp_size=self.virtual_pipeline,
            first_stage_layers=self.first_stage_layers,
            last_stage_layers=self.last_stage_layers,
            layers_per_stage=self.layers_per_stage,
        )

    def coordinates(self) -> list[Coordinates]:
        """Return the coordinates of every rank, in Megatron's default order.

        The order is tensor, context, expert, data, pipeline; tensor varies fastest, pipeline
        slowest.

        Raises:
            ModelError: the product of the sizes does not divide `ranks`.
        """
        for product in (
            self.pipeline * self.tensor * self.context,
            self.pipeline * self.expert * self.expert_tensor,
        ):
            if product < 1 or self.ranks % product:
                raise ModelError(
                    f"{self.ranks} ranks are not a multiple of {product}, the product of the "
                    f"parallel sizes {self}"
                )
        stage = self.ranks // self.pipeline
        return [
            self.place(
                tp_rank=rank % self.tensor,
                pp_rank=rank // stage,
                ep_rank=rank % stage // self.expert_tensor % self.expert,
                etp_rank=rank % stage % self.expert_tensor,
            )
            for rank in range(self.ranks)
        ]


def whole(name: str, source: str, shape: Sequence[int]) -> LocalTensor:
    """Return the description of a tensor that is replicated on every rank of the stage."""
    zeros = (0,) * len(shape)
    return LocalTensor(name, tuple(shape), (Piece(source, zeros, zeros, tuple(shape)),))


def split(
    name: str, source: str, shape: Sequence[int], dim: int, rank: int, size: int
) -> LocalTensor:
    """Return this rank's part of an even split of one HF tensor along `dim`."""
    local = list(shape)
    local[dim] //= size
    start = [0] * len(shape)
    start[dim] = rank * local[dim]
    return LocalTensor(
        name, tuple(local), (Piece(source, tuple(start), (0,) * len(shape), tuple(local)),)
    )


def vocabulary(
    name: str, source: str, vocab: int, hidden: int, rank: int, size: int, padded: int | None = None
) -> LocalTensor:
    """Split `[vocab, hidden]` across ranks, with the vocabulary padded to `padded` rows (None: to a
    multiple of `size`).

    Padding rows have no source.
    """
    rows = (padded or padded_vocab_size(vocab, size)) // size
    start = min(rank * rows, vocab)
    real = min(rows, vocab - start)
    pieces = (Piece(source, (start, 0), (0, 0), (real, hidden)),) if real > 0 else ()
    return LocalTensor(name, (rows, hidden), pieces, padding_rows=rows - max(real, 0))


def padded_vocab_size(vocab: int, tp_size: int) -> int:
    """Return the smallest multiple of `tp_size` that is at least `vocab`."""
    return -(-vocab // tp_size) * tp_size


def stacked(name: str, parts: Sequence[tuple[str, int, int]], tail: Sequence[int]) -> LocalTensor:
    """Stack rows of several HF tensors.

    `parts` are (HF name, first row, number of rows); `tail` is the shape after the row dimension.
    """
    pieces = []
    row = 0
    zeros = (0,) * len(tail)
    for source, first, rows in parts:
        pieces.append(Piece(source, (first, *zeros), (row, *zeros), (rows, *tail)))
        row += rows
    return LocalTensor(name, (row, *tail), tuple(pieces))


def stacked_rows(
    name: str, parts: Sequence[tuple[str, int, int]], tail: Sequence[int], rank: int, size: int
) -> LocalTensor:
    """Return this rank's even share of the rows of `stacked(name, parts, tail)`. A part may be
    split across ranks."""
    total = sum(rows for _, _, rows in parts)
    low = total // size * rank
    high = total // size * (rank + 1)
    mine = []
    row = 0
    for source, first, rows in parts:
        start = max(row, low)
        end = min(row + rows, high)
        if start < end:
            mine.append((source, first + start - row, end - start))
        row += rows
    return stacked(name, mine, tail)


def boxes(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Decompose the elements [low, high) of a row-major array into (start, size) rectangles, in
    order.

    Each is contiguous in the flat array.
    """
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first = -(-low // inner)
    last = high // inner
    if first > last:  # all within one row
        yield from _within(shape, last, low, high)
        return
    yield from _within(shape, first - 1, low, first * inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * inner, high)


def _within(
    shape: tuple[int, ...], row: int, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    base = row * prod(shape[1:])
    for start, size in boxes(shape[1:], low - base, high - base):
        yield (row, *start), (1, *size)
