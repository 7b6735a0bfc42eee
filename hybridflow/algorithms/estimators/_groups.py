"""Statistics of the samples of a prompt, for estimators that compare them. B samples in G groups;
torch's methods only.

Scores of a group that are all equal are centred to exactly 0: a mean in floating point would leave
a rounding error, which a division by a small standard deviation makes large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Groups:
    """The group of each sample as a number from 0 [B], and how many samples each group has [G], in
    float64."""

    of: torch.Tensor
    count: torch.Tensor

    @classmethod
    def by(cls, groups_B: torch.Tensor) -> Groups:
        """Groups by their ids, which come in any order."""
        _, group = groups_B.unique(return_inverse=True)
        count = group.bincount().double()
        return cls(group, count)

    @property
    def alone(self) -> torch.Tensor:
        """[B] whether a sample is the only one of its group."""
        return (self.count == 1)[self.of]

    def ranked(self, scores_B: torch.Tensor) -> torch.Tensor:
        """[B] rows in the order of groups, of each group the best first; equal ones in their
        order."""
        order = scores_B.argsort(descending=True, stable=True)
        return order[self.of[order].argsort(stable=True)]

    def sums(self, values_B: torch.Tensor) -> torch.Tensor:
        """[G] float64."""
        return self.count.new_zeros(len(self.count)).index_add_(0, self.of, values_B.double())

    def centred(
        self, scores_B: torch.Tensor, weights_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B] float64 score less the (weighted) mean of its group; the score itself where it is
        alone, 0 where the scores of a group are equal."""
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
        """[G] float64 unbiased standard deviation; 1 in a group of one sample."""
        squares = self.sums(self.centred(scores_B) ** 2)
        return (squares / (self.count - 1).clamp(min=1)).sqrt().where(self.count > 1, 1.0)
