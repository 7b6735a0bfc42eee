"""Group-relative advantages: a sample is compared with the other samples of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Samples, estimator

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GrpoOptions:
    """Whether advantages are divided by the standard deviation of their group; without that it is Dr.GRPO."""

    norm_adv_by_std: bool = True


@estimator("grpo", compares_samples=True, options=GrpoOptions)
def grpo(samples: Samples, options: GrpoOptions) -> tuple[torch.Tensor, None]:
    """The group-relative advantage of a sample at each of its sampled tokens."""
    advantages = grpo_advantages(samples.scores, samples.groups, norm_by_std=options.norm_adv_by_std)
    return samples.over_tokens(advantages), None


def grpo_advantages(
    scores_B: torch.Tensor, groups_B: torch.Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """(score - mean) / (std + eps) within the samples of one prompt.

    DeepSeekMath (arXiv 2402.03300), equation for outcome supervision; without the division, Dr.GRPO (arXiv 2503.20783).
    The standard deviation is the unbiased one. Computed in float64, and exactly 0 where the scores of a group are
    equal: float32 would leave rounding errors over `eps`. A group of one sample has mean 0 and std 1, so its advantage
    is its score.

    Args:
        scores_B: [B] one score a sample.
        groups_B: [B] integer id of the prompt each sample belongs to, in any order.

    Returns:
        [B] fp32.
    """
    scores = scores_B.double()
    _, group = groups_B.unique(return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    count = scores.new_zeros(num_groups).index_add_(0, group, scores.new_ones(len(scores)))
    mean = scores.new_zeros(num_groups).index_add_(0, group, scores) / count
    mean = mean.where(count > 1, 0.0)
    first = scores.new_zeros(num_groups).scatter_(0, group, scores)  # any score of the group
    differs = scores.new_zeros(num_groups).index_add_(0, group, (scores != first[group]).double())
    centred = (scores - mean[group]).where((differs > 0)[group] | (count == 1)[group], 0.0)
    if not norm_by_std:
        return centred.float()
    variance = scores.new_zeros(num_groups).index_add_(0, group, centred**2) / (count - 1).clamp(min=1)
    std = variance.sqrt().where(count > 1, 1.0)
    return (centred / (std[group] + eps)).float()
