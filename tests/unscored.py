"""A scorer for tests of rollouts in which nobody asks what an answer is worth."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.batch import DataProto
from hybridflow.rollout.evaluation import Scoring


class Unscored:
    """The part of `Scorer` that `Groups` calls before somebody wants the scores."""

    def begin(self, batch: DataProto, size: int) -> list[Scoring]:
        """An empty part for each group."""
        return [Scoring((), ())] * (len(batch) // size)

    def forget(self, parts: Sequence[Scoring]) -> None:
        """Nothing was begun."""
