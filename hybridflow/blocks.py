"""Columns in several blocks: what the ranks of a call returned, here in memory but not joined; and copies by several threads.

Joining costs a pass over memory that most readers do not need: rows lie in one block each, and a loop over blocks sees all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hybridflow.jagged import Jagged

Block = np.ndarray | Jagged
T = TypeVar("T")
R = TypeVar("R")

_THREADED_BYTES = 8 << 20
_MAX_THREADS = 4  # a few saturate the memory of a machine


def for_each(function: Callable[[T], R], items: Mapping[str, T], nbytes: int) -> dict[str, R]:
    """`function` of each item; with many bytes to copy (numpy lets go of the interpreter lock meanwhile) in several threads."""
    threads = min(len(os.sched_getaffinity(0)), len(items), _MAX_THREADS)
    if nbytes < _THREADED_BYTES or threads < 2:
        return {name: function(item) for name, item in items.items()}
    with ThreadPoolExecutor(threads) as pool:  # not kept: starting it takes a tenth of a millisecond, and it would not survive a fork
        return dict(zip(items, pool.map(function, items.values()), strict=True))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows of two or more blocks of one row type, laid end to end. Immutable."""

    blocks: tuple[Block, ...]

    @staticmethod
    def of(blocks: Sequence[Block]) -> Block | Blocks:
        """The column made of `blocks` (at least one): itself, when only one has rows."""
        filled = [block for block in blocks if len(block)] or blocks[:1]
        return filled[0] if len(filled) == 1 else Blocks(tuple(filled))

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
        """One contiguous column: one allocation and one pass."""
        jagged = [block for block in self.blocks if isinstance(block, Jagged)]
        return Jagged.concat(jagged) if jagged else np.concatenate([block for block in self.blocks if isinstance(block, np.ndarray)])

    def slice(self, start: int, stop: int) -> Block | Blocks:
        """Rows `start..stop`; nothing is copied."""
        return Blocks.of(_runs(self.blocks, [(start, max(start, stop))]))

    def take(self, index: np.ndarray) -> Block | Blocks:
        """Rows at `index` `[K]` (non-negative, may repeat). Few runs of consecutive rows stay views, others are gathered in one pass."""
        return take_blocks(self.blocks, index)


def take_blocks(blocks: Sequence[Block], index: np.ndarray) -> Block | Blocks:
    """Rows at `index` `[K]` of `blocks` laid end to end, see `Blocks.take`.

    Raises:
        IndexError: there are fewer rows.
    """
    rows = sum(map(len, blocks))
    if len(index) and int(index.max()) >= rows:
        raise IndexError(f"row {int(index.max())} of blocks of {rows} rows")
    turns = np.flatnonzero(np.diff(index) != 1) + 1
    if len(turns) > 4 * len(blocks):
        return _gather(blocks, index)
    starts, ends = [0, *turns.tolist()], [*turns.tolist(), len(index)]
    runs = [(int(index[a]), int(index[a]) + b - a) for a, b in zip(starts, ends, strict=True)] if len(index) else [(0, 0)]
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
    starts = np.cumsum([0, *map(len, blocks)])
    block_of = np.searchsorted(starts, index, side="right") - 1
    within = index - starts[block_of]
    jagged = [block for block in blocks if isinstance(block, Jagged)]
    if jagged:
        offsets = [block.offsets.tolist() for block in jagged]
        pieces = [jagged[b].values[offsets[b][i] : offsets[b][i + 1]] for b, i in zip(block_of.tolist(), within.tolist(), strict=True)]
        return Jagged.from_lengths(np.concatenate(pieces), [len(piece) for piece in pieces])
    dense = [block for block in blocks if isinstance(block, np.ndarray)]
    out = np.empty((len(index), *dense[0].shape[1:]), dense[0].dtype)
    for number, block in enumerate(dense):
        rows = np.flatnonzero(block_of == number)
        out[rows] = block[within[rows]]
    return out
