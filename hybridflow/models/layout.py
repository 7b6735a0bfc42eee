"""How a tensor in Hugging Face form is cut over Megatron ranks, as data.

A rank's local tensor is described by rectangular `Piece`s: (HF tensor, HF region) <-> (local tensor, local region),
both regions of the same shape. Elements of a local tensor that no piece covers are padding (vocabulary rows added so
that tensor parallelism divides) and are zero. Import reads the pieces, export and weight sync send them; nobody knows
the cuts any other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any


@dataclass(frozen=True)
class Piece:
    """One rectangle: `source[source_start : +shape]` in HF form is `local[local_start : +shape]` on the rank."""

    source: str
    source_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The HF side alone; two ranks with equal regions hold replicas."""
        return self.source, self.source_start, self.shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of the local region."""
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True)
class LocalTensor:
    """A rank's parameter: its Megatron name, local shape and the pieces that fill it.

    `dtype` is set where the tensor keeps a precision of its own whatever the model runs in ("float32" for expert
    biases); `is_buffer` says that it is a registered buffer of the module and no parameter; the last `padding_rows`
    rows have no source.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    is_buffer: bool = False
    padding_rows: int = 0


@dataclass(frozen=True)
class Coordinates:
    """Where a rank, or one virtual stage (`vpp_rank`) of it, stands in the Megatron layout.

    `etp` is the tensor parallelism of experts. `first_stage_layers` and `last_stage_layers` are Megatron's
    `num_layers_in_first_pipeline_stage` and `..._last_...`; 0 leaves the stage an even share. `layers_per_stage` says
    the layers of every (virtual) stage in the order of the model, `pp_size * vpp_size` numbers; empty: not listed. All
    numbers are integers, so that a `row` of them can travel as one tensor.
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
        """All numbers in the order of the fields, the listed layers last."""
        return [*(getattr(self, one.name) for one in fields(self)[:-1]), *self.layers_per_stage]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Coordinates:
        """The inverse of `row`."""
        names = [one.name for one in fields(cls)[:-1]]
        numbers: dict[str, Any] = dict(zip(names, row, strict=False))
        return cls(**numbers, layers_per_stage=tuple(row[len(names) :]))

    @property
    def is_even(self) -> bool:
        """Whether every stage has an equal share of the layers."""
        return not (self.first_stage_layers or self.last_stage_layers or self.layers_per_stage)

    def chunk_layers(self, num_layers: int) -> list[int]:
        """Number of layers of each virtual stage in the order of the model: the first of every pipeline stage, then the
        second of every one, and so on. Everything that asks which layers a rank holds asks this."""
        if self.layers_per_stage:
            return list(self.layers_per_stage)
        return [count // self.vpp_size for count in self.stage_layers(num_layers)] * self.vpp_size

    def stage_layers(self, num_layers: int) -> list[int]:
        """Number of layers of each pipeline stage, all virtual stages of it together."""
        if self.layers_per_stage:
            return [sum(self.layers_per_stage[stage :: self.pp_size]) for stage in range(self.pp_size)]
        first, last = self.first_stage_layers, self.last_stage_layers
        middle = self.pp_size - (first > 0) - (last > 0)
        counts = [(num_layers - first - last) // middle if middle > 0 else 0] * self.pp_size
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
        return counts

    def layers(self, num_layers: int) -> range:
        """Global indices of this (virtual) stage's layers, as `get_transformer_layer_offset` of Megatron-Core 0.16
        gives them."""
        counts, chunk = self.chunk_layers(num_layers), self.vpp_rank * self.pp_size + self.pp_rank
        start = sum(counts[:chunk])
        return range(start, start + counts[chunk])

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0 and self.vpp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the final norm and the output layer."""
        return self.pp_rank == self.pp_size - 1 and self.vpp_rank == self.vpp_size - 1

    def virtual_stages(self) -> list[Coordinates]:
        """The coordinates of each virtual stage (model chunk) of this rank."""
        return [replace(self, vpp_rank=chunk) for chunk in range(self.vpp_size)]


def whole(name: str, source: str, shape: Sequence[int]) -> LocalTensor:
    """A tensor that every rank of the stage holds whole."""
    zeros = (0,) * len(shape)
    return LocalTensor(name, tuple(shape), (Piece(source, zeros, zeros, tuple(shape)),))


def split(name: str, source: str, shape: Sequence[int], dim: int, rank: int, size: int) -> LocalTensor:
    """An even split of one HF tensor along `dim`."""
    local = list(shape)
    local[dim] //= size
    start = [0] * len(shape)
    start[dim] = rank * local[dim]
    return LocalTensor(name, tuple(local), (Piece(source, tuple(start), (0,) * len(shape), tuple(local)),))


def vocabulary(
    name: str, source: str, vocab: int, hidden: int, rank: int, size: int, padded: int | None = None
) -> LocalTensor:
    """A split of `[vocab, hidden]` over ranks, the vocabulary `padded` (None: to a multiple of `size`); padding rows
    have no source."""
    rows = (padded or padded_vocab_size(vocab, size)) // size
    start = min(rank * rows, vocab)
    real = min(rows, vocab - start)
    pieces = (Piece(source, (start, 0), (0, 0), (real, hidden)),) if real > 0 else ()
    return LocalTensor(name, (rows, hidden), pieces, padding_rows=rows - max(real, 0))


def padded_vocab_size(vocab: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that holds the vocabulary."""
    return -(-vocab // tp_size) * tp_size


def stacked(name: str, parts: Sequence[tuple[str, int, int]], tail: Sequence[int]) -> LocalTensor:
    """Rows of several HF tensors one under another: parts are (HF name, first row, number of rows); `tail` are the
    other dimensions."""
    pieces, row, zeros = [], 0, (0,) * len(tail)
    for source, first, rows in parts:
        pieces.append(Piece(source, (first, *zeros), (row, *zeros), (rows, *tail)))
        row += rows
    return LocalTensor(name, (row, *tail), tuple(pieces))


def stacked_rows(
    name: str, parts: Sequence[tuple[str, int, int]], tail: Sequence[int], rank: int, size: int
) -> LocalTensor:
    """This rank's even share of the rows of `stacked(name, parts, tail)`; the cut may go through a part."""
    total = sum(rows for _, _, rows in parts)
    low, high = total // size * rank, total // size * (rank + 1)
    mine, row = [], 0
    for source, first, rows in parts:
        start, end = max(row, low), min(row + rows, high)
        if start < end:
            mine.append((source, first + start - row, end - start))
        row += rows
    return stacked(name, mine, tail)


def boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [low, high) of a row-major array as (start, size) rectangles, in order; each is contiguous in the
    flat array."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner
    if first > last:  # within one row
        yield from _within(shape, last, low, high)
        return
    yield from _within(shape, first - 1, low, first * inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * inner, high)


def _within(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    base = row * prod(shape[1:])
    for start, size in boxes(shape[1:], low - base, high - base):
        yield (row, *start), (1, *size)
