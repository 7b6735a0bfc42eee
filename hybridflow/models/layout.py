"""How a tensor in Hugging Face form is cut over Megatron ranks, as data.

A rank's local tensor is described by rectangular `Piece`s: (HF tensor, HF region) <-> (local tensor, local region), both regions of
the same shape. Elements of a local tensor that no piece covers are padding (vocabulary rows added so that tensor parallelism divides)
and are zero.
Import reads the pieces, export and weight sync send them; nobody knows the cuts any other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


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
    """A rank's parameter: its Megatron name, local shape and the pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the Megatron layout. `etp` is the tensor parallelism of experts."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    def layers(self, num_layers: int) -> range:
        """Global indices of this stage's layers (an even split, no virtual stages)."""
        share = num_layers // self.pp_size
        return range(self.pp_rank * share, (self.pp_rank + 1) * share)

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the final norm and the output layer."""
        return self.pp_rank == self.pp_size - 1


def whole(name: str, source: str, shape: Sequence[int]) -> LocalTensor:
    """A tensor every rank of the stage holds in full."""
    zeros = (0,) * len(shape)
    return LocalTensor(name, tuple(shape), (Piece(source, zeros, zeros, tuple(shape)),))


def split(name: str, source: str, shape: Sequence[int], dim: int, rank: int, size: int) -> LocalTensor:
    """An even split of one HF tensor along `dim`."""
    local = list(shape)
    local[dim] //= size
    start = [0] * len(shape)
    start[dim] = rank * local[dim]
    return LocalTensor(name, tuple(local), (Piece(source, tuple(start), (0,) * len(shape), tuple(local)),))


def vocabulary(name: str, source: str, vocab: int, hidden: int, rank: int, size: int) -> LocalTensor:
    """A split of `[vocab, hidden]` over ranks, the vocabulary padded to a multiple of `size`; padding rows have no source."""
    rows = padded_vocab_size(vocab, size) // size
    start = min(rank * rows, vocab)
    real = min(rows, vocab - start)
    pieces = (Piece(source, (start, 0), (0, 0), (real, hidden)),) if real > 0 else ()
    return LocalTensor(name, (rows, hidden), pieces)


def padded_vocab_size(vocab: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that holds the vocabulary."""
    return -(-vocab // tp_size) * tp_size


def stacked(name: str, parts: Sequence[tuple[str, int, int]], tail: Sequence[int]) -> LocalTensor:
    """Rows of several HF tensors one under another: parts are (HF name, first row, number of rows); `tail` are the other dimensions."""
    pieces, row, zeros = [], 0, (0,) * len(tail)
    for source, first, rows in parts:
        pieces.append(Piece(source, (first, *zeros), (row, *zeros), (rows, *tail)))
        row += rows
    return LocalTensor(name, (row, *tail), tuple(pieces))
