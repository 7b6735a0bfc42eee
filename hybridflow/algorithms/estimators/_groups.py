"""Per-prompt statistics for estimators that compare the samples of a prompt: B samples in G groups.
Calls only tensor methods, so it does not import torch.

If all scores in a group are equal, they are centred to exactly 0. A floating-point mean would leave
a rounding error, which dividing by a small standard deviation would amplify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Groups:
    """The group index of each sample [B], starting at 0, and the number of samples per group [G],
    in float64."""

    of: torch.Tensor
    count: torch.Tensor

    @classmethod
    def by(cls, groups_B: torch.Tensor) -> Groups:
        """Group the samples by id. The ids may be in any order."""
        _, group = groups_B.unique(return_inverse=True)
        count = group.bincount().double()
        return cls(group, count)

    @property
    def alone(self) -> torch.Tensor:
        """Mask [B] that is True for each sample that is alone in its group."""
        return (self.count == 1)[self.of]

    def ranked(self, scores_B: torch.Tensor) -> torch.Tensor:
        """Return [B] row indices ordered by group and, within a group, by descending score. Ties
        keep their original order."""
        order = scores_B.argsort(descending=True, stable=True)
        return order[self.of[order].argsort(stable=True)]

    def sums(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return the sum over each group, [G] float64."""
        return self.count.new_zeros(len(self.count)).index_add_(0, self.of, values_B.double())

    def centred(
        self, scores_B: torch.Tensor, weights_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [B] float64 scores minus their group's (weighted) mean. The score of a sample that
        is alone in its group is unchanged; if all scores in a group are equal, they become 0.
        """
        scores = scores_B.double()
        if weights_B is None:
            mean = self.sums(scores) / self.count
        else:
            mean = self.sums(scores * weights_B) / self.sums(weights_B).clamp(min=1e-30)
        mean = mean.where(self.count > 1, 0.0)
        # any score of the group
        first = scores.new_zeros(len(self.count)).scatter_(0, self.of, scores)
        differs = self.sums(scores != first[self.of]) > 0
        return (scores - mean[self.of]).where(differs[self.of] | self.alone, 0.0)

    def std(self, scores_B: torch.Tensor) -> torch.Tensor:
        """Return the unbiased standard deviation of each group, [G] float64; 1 for a group of one
        sample.
        """
        squares = self.sums(self.centred(scores_B) ** 2)
        return (squares / (self.count - 1).clamp(min=1)).sqrt().where(self.count > 1, 1.0)
