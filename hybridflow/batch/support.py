"""The batch columns of sampling supports: for each response token, the candidate tokens that
remained after top-p, top-k and min-p filtering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridflow.batch.jagged import Jagged

# jagged int32 [response tokens]: support size of each token; 0 means the full vocabulary
SUPPORT_SIZES = "support_sizes"
# jagged int32 [sum of sizes]: token ids of the supports, concatenated over response tokens
SUPPORT_IDS = "support_ids"
SUPPORT = (SUPPORT_SIZES, SUPPORT_IDS)


@dataclass(frozen=True)
class Supports:
    """Supports of consecutive tokens: sizes [t] and ids [sum of sizes], both int32."""

    sizes: np.ndarray
    ids: np.ndarray

    @classmethod
    def unknown(cls, tokens: int) -> Supports:
        """Return supports for tokens that were not sampled, or were sampled from the full
        vocabulary."""
        return cls(np.zeros(tokens, np.int32), np.empty(0, np.int32))

    @classmethod
    def concat(cls, parts: Sequence[Supports]) -> Supports:
        """Concatenate the supports of all parts."""
        sizes = []
        ids = []
        for one in (cls.unknown(0), *parts):
            sizes.append(one.sizes)
            ids.append(one.ids)
        return cls(np.concatenate(sizes), np.concatenate(ids))

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, keep: np.ndarray | slice) -> Supports:
        """Select the supports of some tokens by slice, mask [t] or indices."""
        starts = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        sizes = self.sizes[keep]
        ends = np.cumsum(sizes, dtype=np.int64)
        index = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
            starts[keep] - (ends - sizes), sizes
        )
        return Supports(sizes, self.ids[index])


def support_columns(rows: Sequence[Supports]) -> dict[str, Jagged]:
    """Build the `SUPPORT` columns, one row per response."""
    return {
        SUPPORT_SIZES: Jagged.from_rows([one.sizes for one in rows], np.int32),
        SUPPORT_IDS: Jagged.from_rows([one.ids for one in rows], np.int32),
    }
