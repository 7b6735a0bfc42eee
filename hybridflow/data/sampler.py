"""A reproducible sampler that iterates over the rows of a dataset endlessly and can be resumed
exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridflow.errors import CheckpointError


class ResumableSampler:
    """Yields batches of row numbers for an unlimited number of epochs.

    The order is a single stream of epochs, each of them a permutation of all rows drawn from (seed,
    epoch), or 0, 1, 2, ... without shuffling. A batch is the next `batch_size` entries of the
    stream. Rows left at the end of an epoch start the first batch of the next one: no row is
    skipped and every row appears exactly once per epoch, but a batch that spans two epochs may
    contain a row twice. The state is the position in the stream, so resuming is exact at every
    point, including the last batch of an epoch, and `batch_size` may change on resume.

    With `weights`, an epoch still has `num_rows` entries, but a row appears about `num_rows *
    weight / sum(weights)` times, rounded up or down at random. With `difficulty`, each epoch runs
    from easy to hard; rows of equal difficulty keep their shuffled order.

    Args:
        num_rows: rows of the dataset, at least 1.
        batch_size: rows per batch, at least 1; may exceed `num_rows`.
        shuffle: False yields the rows in file order.
        seed: not negative.
        weights: [num_rows], not negative, at least one positive; None uses every row once per
            epoch.
        difficulty: [num_rows], finite; None disables the curriculum.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        weights: np.ndarray | None = None,
        difficulty: np.ndarray | None = None,
    ) -> None:
        if num_rows < 1 or batch_size < 1 or seed < 0:
            raise ValueError(
                f"num_rows and batch_size must be positive and seed not negative, got {num_rows}, "
                f"{batch_size}, {seed}"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.weights = _checked("weights", weights, num_rows)
        self.difficulty = _checked("difficulty", difficulty, num_rows)
        if self.weights is not None and ((self.weights < 0).any() or not self.weights.any()):
            raise ValueError("weights must not be negative, and at least one must be positive")
        self.order_by = _fingerprint(self.weights, self.difficulty)
        self.position = 0
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[np.ndarray]:
        """Return the sampler itself; iteration never ends."""
        return self

    def __next__(self) -> np.ndarray:
        """Return the row numbers of the next batch, [batch_size] int64, and advance the state."""
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
        """Return the row numbers [num_rows] of one epoch. The current epoch is cached."""
        if self._cached[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            rows = np.arange(self.num_rows, dtype=np.int64)
            if self.weights is not None:
                rows = _drawn(self.weights, random)
            if self.shuffle:
                rows = random.permutation(rows)
            if self.difficulty is not None:
                rows = rows[np.argsort(self.difficulty[rows], kind="stable")]
            self._cached = (epoch, rows)
        return self._cached[1]

    def state(self) -> dict[str, Any]:
        """Return a JSON-serializable state for `restore`."""
        return {
            "position": self.position,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "order_by": self.order_by,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from exactly the point at which `state()` was called.

        Raises:
            CheckpointError: the state is malformed, or was saved with a different dataset length,
                seed or shuffling, so the order cannot be continued. In that case, the sampler
                remains unchanged.
        """
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise CheckpointError(
                f"the sampler state {state!r} has no valid position; the checkpoint was not "
                "written by this version"
            )
        for key, meaning in (
            ("num_rows", "rows in the dataset"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
        ):
            now = getattr(self, key)
            if state.get(key) != now:
                raise CheckpointError(
                    f"cannot resume: {meaning} was {state.get(key)!r} when the checkpoint was "
                    f"written and is {now!r} now; restore the old value, or start a new run with "
                    "another name"
                )
        if state.get("order_by") != self.order_by:
            raise CheckpointError(
                "cannot resume: the rows' weights or difficulty differ from the checkpoint's; "
                "restore the columns they come from, or start a new run with another name"
            )
        self.position = position


def _checked(what: str, values: np.ndarray | None, num_rows: int) -> np.ndarray | None:
    if values is None:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != (num_rows,) or not np.isfinite(numbers).all():
        raise ValueError(
            f"{what} must be {num_rows} finite numbers, got shape {list(numbers.shape)}"
        )
    return numbers


def _drawn(weights: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw as many rows as there are weights, using systematic sampling: each row is drawn as often
    as expected, rounded up or down. Returns the rows sorted."""
    ends = np.cumsum(weights) * (len(weights) / weights.sum())
    ends[-1] = len(weights)
    return np.searchsorted(ends, np.arange(len(weights)) + random.random(), side="right").clip(
        max=len(weights) - 1
    )


def _fingerprint(*columns: np.ndarray | None) -> str | None:
    """Return a hash of the weights and difficulties, or None if neither is set."""
    if all(column is None for column in columns):
        return None
    digest = hashlib.sha256()
    for column in columns:
        digest.update(b"none" if column is None else column.tobytes())
    return digest.hexdigest()[:16]
