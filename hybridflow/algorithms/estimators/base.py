"""The inputs and outputs of an advantage estimator, token rewards from the scores of rows, and the
decorator that registers estimators. Each built-in estimator is defined in a file of the same name
in this package. These files import torch only for type checkers and use only tensor methods, so
that `--explain` can import them without loading torch; the same holds for this file. User files may
import anything.

`Groups` has the per-prompt statistics for estimators that compare the samples of a prompt: B
samples in G groups. If all scores in a group are equal, they are centred to exactly 0. A
floating-point mean would leave a rounding error, which dividing by a small standard deviation would
amplify.

In functions on rows, T is the number of response tokens in a batch, with rows concatenated without
padding; S is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.config.entries import ESTIMATORS, Estimator, NoOptions

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    import torch


# advantages [T]; with a critic, also the returns [T] that it is trained on
Estimate: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
Function = Callable[["Samples", Any], "Estimate"]


@dataclass(frozen=True)
class Samples:
    """The samples of one step: B samples and their T response tokens, concatenated without padding.

    Attributes:
        scores: [B] f32 reward of each sample, minus its KL penalties.
        rewards: [T] f32 the same reward, distributed over tokens: the negative penalty of each
            token, plus the score at the last sampled token.
        groups: [B] int64 index of each sample's prompt.
        lengths: [B] int64 number of response tokens of each sample.
        mask: [T] bool, True for tokens sampled by the policy. The advantages and returns of all
            other tokens are 0.
        columns: the columns listed in the estimator's `reads`: [T], or [B] if the batch has one
            value per sample.
        parts: additional numbers [B] that the reward function returned for every sample, keyed by
            name.
        part_rewards: [T] for samples with turn or token rewards: the reward of each part at the
            part's last token, minus the KL penalty of each token. None without such rewards.
        part_ends: [T] bool, True for the last token of each part; set together with part_rewards.
    """

    scores: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    part_rewards: torch.Tensor | None = None
    part_ends: torch.Tensor | None = None

    def over_tokens(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return each sample's value at its sampled tokens, and 0 at all other tokens, as [T]."""
        return values_B.repeat_interleave(self.lengths).where(self.mask, 0.0)


def estimator(
    name: str,
    *,
    reads: tuple[str, ...] = (),
    needs_critic: bool = False,
    compares_samples: bool = False,
    options: type = NoOptions,
    aggregations: tuple[str, ...] = (),
    takes_parts: bool = False,
    preferences: bool = False,
) -> Callable[[Function], Function]:
    """Register a function that maps (samples, options) to (advantages, returns or None).
    `Estimator` documents the arguments."""
    declared = (
        reads,
        needs_critic,
        compares_samples,
        options,
        aggregations,
        takes_parts,
        preferences,
    )
    return ESTIMATORS.entry(name, lambda function: Estimator(function, *declared))


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


def token_rewards(
    scores_S: torch.Tensor,
    penalty_T: torch.Tensor,
    lengths_S: torch.Tensor,
    mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] rewards: the negative penalty of each token, plus the row's score at its last
    sampled token. A row without a sampled token has no reward.

    Args:
        scores_S: [S] scores, one per row.
        penalty_T: [T] subtracted from each token's reward (coefficient times KL estimate, or
            zeros).
        lengths_S: [S] int64 number of tokens in each row.
        mask_T: [T] bool, True for tokens sampled by the policy; None means all of them.
    """
    rewards = -penalty_T.float()
    row = rows_of_tokens(lengths_S)
    place = row.new_ones(len(row)).cumsum(0) - 1
    if mask_T is not None:
        row = row[mask_T]
        place = place[mask_T]
    last = lengths_S.new_full(lengths_S.shape, -1).scatter_reduce_(0, row, place, "amax")
    rewards[last[last >= 0]] += scores_S.float()[last >= 0]
    return rewards


def overlong_penalties(
    lengths_S: torch.Tensor, limit: int, buffer: int, penalty: float
) -> torch.Tensor:
    """Return [S] penalties for long answers: 0 up to `limit - buffer` tokens, then linear to
    `penalty` at `limit`.

    DAPO (arXiv 2503.14476), equation 13: soft overlong punishment.
    """
    return ((lengths_S - (limit - buffer)) / buffer).clamp(min=0.0) * penalty


def sums_of_rows(values_T: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of each row, [S]."""
    return values_T.new_zeros(len(lengths_S)).index_add(0, rows_of_tokens(lengths_S), values_T)


def rows_of_tokens(lengths_S: torch.Tensor) -> torch.Tensor:
    """Return [T] the row index of each token."""
    return (lengths_S.new_ones(len(lengths_S)).cumsum(0) - 1).repeat_interleave(lengths_S)
