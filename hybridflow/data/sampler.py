"""Which rows come next: an endless, reproducible, exactly resumable order over the rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridflow.errors import CheckpointError


class ResumableSampler:
    """Batches of row numbers over endless epochs.

    The order is one stream: epoch 0 followed by epoch 1 and so on, each epoch a permutation of all rows drawn from (seed, epoch) alone
    (or 0, 1, 2, ... without shuffling). A batch is the next `batch_size` entries of that stream. Rows left at the end of an epoch open
    the first batch of the next one: no row is ever skipped and every row comes exactly once an epoch, at the price that the one batch
    lying across two epochs may hold a row twice. The state is the position in the stream, so it is exact at every point, the last
    batch of an epoch included, and `batch_size` may be changed on resume.

    Args:
        num_rows: rows of the dataset, at least 1.
        batch_size: rows a batch, at least 1; may exceed `num_rows`.
        shuffle: False yields the rows in file order.
        seed: not negative.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if num_rows < 1 or batch_size < 1 or seed < 0:
            raise ValueError(f"num_rows and batch_size must be positive and seed not negative, got {num_rows}, {batch_size}, {seed}")
        self.num_rows, self.batch_size, self.shuffle, self.seed = num_rows, batch_size, shuffle, seed
        self.position = 0
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def epoch(self) -> int:
        """Epoch of the next row, counted from 0."""
        return self.position // self.num_rows

    def __iter__(self) -> Iterator[np.ndarray]:
        """The sampler itself; it never ends."""
        return self

    def __next__(self) -> np.ndarray:
        """The next batch: row numbers [batch_size] int64. The state moves when the batch is handed out."""
        pieces: list[np.ndarray] = []
        missing = self.batch_size
        while missing:
            epoch, offset = divmod(self.position, self.num_rows)
            piece = self._order(epoch)[offset : offset + missing]
            pieces.append(piece)
            missing -= len(piece)
            self.position += len(piece)
        return np.concatenate(pieces)

    def _order(self, epoch: int) -> np.ndarray:
        """Row numbers [num_rows] of one epoch; the current epoch's are kept."""
        if self._cached[0] != epoch:
            rows = np.arange(self.num_rows, dtype=np.int64)
            self._cached = (epoch, np.random.default_rng([self.seed, epoch]).permutation(rows) if self.shuffle else rows)
        return self._cached[1]

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able."""
        return {"position": self.position, "num_rows": self.num_rows, "shuffle": self.shuffle, "seed": self.seed}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues exactly where the sampler that gave `state` stood.

        Raises:
            CheckpointError: the dataset's length, the seed or shuffling differ from those the state was taken with, so that the same
                order cannot be continued; or the state is malformed. The sampler is then unchanged.
        """
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise CheckpointError(f"the sampler state {state!r} has no valid position; the checkpoint is not one of this version")
        for key, meaning in (("num_rows", "rows in the dataset"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            now = getattr(self, key)
            if state.get(key) != now:
                raise CheckpointError(
                    f"cannot resume: {meaning} was {state.get(key)!r} when the checkpoint was written and is {now!r} now; "
                    "restore the old value, or start a new run with another name"
                )
        self.position = position
