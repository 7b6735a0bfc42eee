"""Shared code for estimators that compare the policy with the reference on each sample. Calls only
tensor methods, so it does not import torch.

The gradient of a preference loss with respect to the log-probability of an answer is a single
number per sample. If that number is the advantage, one policy-gradient update per step
(`actor.policy_loss=reinforce`, or `ppo` at its first update), summed over tokens
(`actor.loss_agg_mode=seq-mean-token-sum`), is exactly a gradient step of that loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Groups, Samples, sums_of_rows

if TYPE_CHECKING:
    import torch

READS = ("old_log_probs", "ref_log_probs")
AGGREGATIONS = ("seq-mean-token-sum",)


@dataclass(frozen=True)
class Beta:
    """Options: `beta`, the strength with which the policy is pulled towards the reference."""

    beta: float = 0.1


def log_ratios(samples: Samples) -> torch.Tensor:
    """Return log p - log p_ref for each answer, summed over its sampled tokens, [B] float64."""
    difference = (samples.columns["old_log_probs"] - samples.columns["ref_log_probs"]).double()
    return sums_of_rows(difference.where(samples.mask, 0.0), samples.lengths)


@dataclass(frozen=True)
class Pairs:
    """The best and the worst answer to each prompt whose answers differ in score: their row indices
    [P], and the number of samples for the prompt [P]."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, samples: Samples) -> Pairs:
        """Pair the answers. If several samples tie for the best score, the first is chosen; if
        several tie for the worst, the last is rejected."""
        groups = Groups.by(samples.groups)
        order = groups.ranked(samples.scores)
        ends = groups.count.long().cumsum(0)
        chosen = order[ends - groups.count.long()]
        rejected = order[ends - 1]
        differ = samples.scores[chosen] > samples.scores[rejected]
        return cls(chosen[differ], rejected[differ], groups.count[differ])

    def advantages(
        self, samples: Samples, chosen_P: torch.Tensor, rejected_P: torch.Tensor
    ) -> torch.Tensor:
        """Assign the given advantages to the tokens of each pair and return them, [T]. They are
        multiplied by the number of samples for the prompt, so that a mean over samples becomes a
        mean over prompts.
        """
        values = chosen_P.new_zeros(len(samples.scores))
        values[self.chosen], values[self.rejected] = self.size * chosen_P, self.size * rejected_P
        return samples.over_tokens(values.to(samples.scores.dtype))
