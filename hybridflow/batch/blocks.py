"""Columns that are here in memory but not contiguous: several blocks laid end to end, rows picked from them; copies by
several threads.

Making them contiguous costs a pass over memory, mostly over fresh pages, that many readers do not need: a batch is put
into another order to be cut up and sent, and each piece is then copied once, when it is sent. What is read as a whole
is copied then, once, and kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from hybridflow.batch.jagged import Jagged, read_only

Block = np.ndarray | Jagged
T = TypeVar("T")
R = TypeVar("R")

_THREADED_BYTES = 8 << 20
_LATER_BYTES = 1 << 20  # what is smaller is copied at once: that costs less than to remember where it lies
_MANY_BLOCKS = 64  # every operation on rows goes through the list of blocks
_MAX_THREADS = 4  # a few saturate the memory of a machine


def for_each(function: Callable[[T], R], items: Mapping[str, T], nbytes: int) -> dict[str, R]:
    """`function` of each item; with many bytes to copy (numpy lets go of the interpreter lock meanwhile) in several
    threads."""
    threads = min(len(os.sched_getaffinity(0)), len(items), _MAX_THREADS)
    if nbytes < _THREADED_BYTES or threads < 2:
        return {name: function(item) for name, item in items.items()}
    with ThreadPoolExecutor(
        threads
    ) as pool:  # not kept: starting it takes a tenth of a millisecond, and it would not survive a fork
        return dict(zip(items, pool.map(function, items.values()), strict=True))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows of two or more blocks of one row type, laid end to end; of one, once they have been joined. Immutable."""

    blocks: tuple[Block, ...]

    @staticmethod
    def of(blocks: Sequence[Block]) -> Block | Blocks:
        """The column made of `blocks` (at least one): itself, when only one has rows."""
        filled = [block for block in blocks if len(block)] or blocks[:1]
        return filled[0] if len(filled) == 1 else Blocks(tuple(filled))

    @staticmethod
    def beside(blocks: Sequence[Block]) -> Block | Blocks:
        """The column made of `blocks`, joined at once where they are small or many."""
        found = Blocks.of(blocks)
        if not isinstance(found, Blocks):
            return found
        large = found.nbytes >= _LATER_BYTES and len(found.blocks) <= _MANY_BLOCKS
        return found if large and found.dtype != object else found.join()

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.blocks[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def lengths(self) -> np.ndarray | None:
        """Row lengths `[B]` of a jagged column; None for a dense one."""
        found = [block.lengths for block in self.blocks if isinstance(block, Jagged)]
        return np.concatenate(found) if found else None

    def join(self) -> Block:
        """One contiguous column: one allocation and one pass, the first time."""
        blocks = self.blocks
        if len(blocks) > 1:
            jagged = [block for block in blocks if isinstance(block, Jagged)]
            dense = [block for block in blocks if isinstance(block, np.ndarray)]
            blocks = (Jagged.concat(jagged) if jagged else read_only(np.concatenate(dense)),)
            object.__setattr__(self, "blocks", blocks)  # the same rows: nobody can tell, but for the time
        return blocks[0]

    def slice(self, start: int, stop: int) -> Block | Blocks:
        """Rows `start..stop`; nothing is copied."""
        return Blocks.of(_runs(self.blocks, [(start, max(start, stop))]))

    def take(self, index: np.ndarray) -> Block | Blocks | Picked:
        """Rows at `index` `[K]` (non-negative, may repeat). Few runs of consecutive rows stay views, others are
        picked."""
        return take_blocks(self.blocks, index)


class Picked:
    """Rows of blocks in any order, also several times, gathered when the column is first read as a whole. Immutable.

    Args:
        blocks: of one row type, laid end to end. index: `[K]` rows of them, non-negative.
    """

    def __init__(self, blocks: tuple[Block, ...], index: np.ndarray) -> None:
        # one attribute: threads may read it meanwhile
        self._state: Block | tuple[tuple[Block, ...], np.ndarray] = (
            blocks,
            index,
        )
        self._rows, self.dtype = len(index), blocks[0].dtype
        found = [block.lengths for block in blocks if isinstance(block, Jagged)]
        self.lengths: np.ndarray | None = np.concatenate(found)[index] if found else None
        self.nbytes = _nbytes(blocks, self._rows, self.lengths)

    @staticmethod
    def of(blocks: Sequence[Block], index: np.ndarray) -> Block | Picked:
        """The rows; gathered at once where they are few: a batch must not be kept in memory by a small part of it."""
        if 2 * len(index) < sum(map(len, blocks)) or blocks[0].dtype == object:
            return _gather(blocks, index)
        picked = Picked(tuple(blocks), index)
        return picked if picked.nbytes >= _LATER_BYTES else picked.join()

    def __len__(self) -> int:
        return self._rows

    @property
    def sample(self) -> Block:
        """No rows, of the column's type."""
        state = self._state
        first = state[0][0] if isinstance(state, tuple) else state
        return first.slice(0, 0) if isinstance(first, Jagged) else first[:0]

    def join(self) -> Block:
        """One contiguous column: one allocation and one pass, the first time; what the rows were picked from is let
        go."""
        state = self._state
        if isinstance(state, tuple):
            gathered = _gather(*state)
            self._state = state = read_only(gathered) if isinstance(gathered, np.ndarray) else gathered
        return state

    def slice(self, start: int, stop: int) -> Block | Picked:
        """Rows `start..stop`."""
        state = self._state
        if isinstance(state, tuple):
            return Picked.of(state[0], state[1][start : max(start, stop)])
        return state.slice(start, stop) if isinstance(state, Jagged) else state[start:stop]

    def take(self, index: np.ndarray) -> Block | Picked:
        """Rows at `index` `[K]` (non-negative, may repeat)."""
        state = self._state
        return Picked.of(state[0], state[1][index]) if isinstance(state, tuple) else Picked.of((state,), index)


def _nbytes(blocks: Sequence[Block], rows: int, lengths: np.ndarray | None) -> int:
    first = blocks[0]
    if isinstance(first, Jagged):
        values = first.values
        total = 0 if lengths is None else int(lengths.sum())
        return total * values.itemsize * prod(values.shape[1:]) + 8 * (rows + 1)
    return rows * first.itemsize * prod(first.shape[1:])


def take_blocks(blocks: Sequence[Block], index: np.ndarray) -> Block | Blocks | Picked:
    """Rows at `index` `[K]` of `blocks` laid end to end, see `Blocks.take`.

    Raises:
        IndexError: there are fewer rows.
    """
    rows = sum(map(len, blocks))
    if len(index) and int(index.max()) >= rows:
        raise IndexError(f"row {int(index.max())} of blocks of {rows} rows")
    turns = np.flatnonzero(np.diff(index) != 1) + 1
    if len(turns) > 4 * len(blocks):
        return Picked.of(blocks, index)
    starts, ends = [0, *turns.tolist()], [*turns.tolist(), len(index)]
    runs = (
        [(int(index[a]), int(index[a]) + b - a) for a, b in zip(starts, ends, strict=True)] if len(index) else [(0, 0)]
    )
    return Blocks.of(_runs(blocks, runs))


def _runs(blocks: Sequence[Block], runs: Sequence[tuple[int, int]]) -> list[Block]:
    """Views of the rows of each run, cut where blocks meet."""
    found: list[Block] = []
    starts = np.cumsum([0, *map(len, blocks)]).tolist()
    for start, stop in runs:
        for block, first, end in zip(blocks, starts[:-1], starts[1:], strict=True):
            low, high = max(start, first) - first, min(stop, end) - first
            if low < high:
                found.append(block.slice(low, high) if isinstance(block, Jagged) else block[low:high])
    empty = blocks[0].slice(0, 0) if isinstance(blocks[0], Jagged) else blocks[0][:0]
    return found or [empty]


def _gather(blocks: Sequence[Block], index: np.ndarray) -> Block:
    """Rows in any order, as one contiguous column."""
    if len(blocks) == 1:
        return blocks[0].take(index) if isinstance(blocks[0], Jagged) else blocks[0][index]
    starts = np.cumsum([0, *map(len, blocks)])
    block_of = np.searchsorted(starts, index, side="right") - 1
    within = index - starts[block_of]
    jagged = [block for block in blocks if isinstance(block, Jagged)]
    if jagged:
        offsets = [block.offsets.tolist() for block in jagged]
        pieces = [
            jagged[b].values[offsets[b][i] : offsets[b][i + 1]]
            for b, i in zip(block_of.tolist(), within.tolist(), strict=True)
        ]
        return Jagged.from_lengths(np.concatenate(pieces), [len(piece) for piece in pieces])
    dense = [block for block in blocks if isinstance(block, np.ndarray)]
    out = np.empty((len(index), *dense[0].shape[1:]), dense[0].dtype)
    for number, block in enumerate(dense):
        rows = np.flatnonzero(block_of == number)
        out[rows] = block[within[rows]]
    return out
