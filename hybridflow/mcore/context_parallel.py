"""Zigzag layout of a packed micro-batch across context-parallel ranks.

With c ranks, every segment is split into 2c chunks of equal length. Rank r gets chunks r and
2c-1-r, so that under a causal mask all ranks do the same amount of work. Megatron's rotary
embedding (rope_utils.py:130) and Transformer Engine require this layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms.vocab_parallel import SumOverGroup


@dataclass(frozen=True)
class ZigZag:
    """For each packed row [t], the rank that owns it (`owner`) and its row index on that rank
    (`local`)."""

    owner: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, bounds: np.ndarray, size: int) -> ZigZag:
        """Build the layout for segment bounds `bounds` [s + 1].

        Every segment's length must be a multiple of 2 x `size` (any length if `size` is 1).
        """
        lengths = np.diff(bounds)
        starts = np.repeat(bounds[:-1], lengths)
        total = int(bounds[-1])
        step = np.arange(total) - starts
        if size == 1:
            return cls(np.zeros(total, np.int64), np.arange(total))
        chunk = np.repeat(lengths // (2 * size), lengths)
        number = step // chunk
        second = number >= size
        owner = np.where(second, 2 * size - 1 - number, number)
        return cls(owner, starts // size + step - number * chunk + np.where(second, chunk, 0))

    def rows_of(self, rank: int) -> np.ndarray:
        """Return the indices [t / size] of the packed rows on `rank`, in local order."""
        rows = np.flatnonzero(self.owner == rank)
        ordered = np.empty_like(rows)
        ordered[self.local[rows]] = rows
        return ordered


def gather_tokens(values: torch.Tensor, places: torch.Tensor | None, total: int) -> torch.Tensor:
    """Gather the values [..., n] of each context-parallel rank's response tokens into [..., total]
    on all ranks.

    `places` [n] contains the indices of this rank's tokens, or is None without context parallelism.
    Since all ranks then compute the same loss, the backward pass returns to each rank only the
    gradient of its own tokens.
    """
    if places is None:
        return values
    group = parallel_state.get_context_parallel_group()
    return SumOverGroup.apply(
        values.new_zeros((*values.shape[:-1], total)).index_copy(-1, places, values), group
    )
