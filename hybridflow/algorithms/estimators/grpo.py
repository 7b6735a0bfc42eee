"""Group-relative advantages: each sample is compared with the other samples for its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GrpoOptions:
    """Options: whether to divide advantages by the standard deviation of their group; False gives
    Dr.GRPO."""

    norm_adv_by_std: bool = True


@dataclass(frozen=True)
class ScaledOptions(GrpoOptions):
    """GRPO's options, and the samples over which the standard deviation is computed: the `group`,
    or all samples in the step (`batch`)."""

    std: Literal["group", "batch"] = "group"


@estimator("grpo", compares_samples=True, options=ScaledOptions)
def grpo(samples: Samples, options: ScaledOptions) -> Estimate:
    """Compute the group-relative advantage of each sample, at each of its sampled tokens.

    If the standard deviation is taken over the batch, easy and hard prompts get equal weight (arXiv
    2508.08221; TRL's scale_rewards=batch).
    """
    by_group = options.norm_adv_by_std and options.std == "group"
    advantages = grpo_advantages(samples.scores, samples.groups, norm_by_std=by_group)
    if options.norm_adv_by_std and not by_group and len(samples.scores) > 1:
        spread = samples.scores.double().std()
        advantages = (advantages.double() / (spread + 1e-6)).to(advantages.dtype)
    return samples.over_tokens(advantages), None


def grpo_advantages(
    scores_B: torch.Tensor, groups_B: torch.Tensor, *, norm_by_std: bool = True
) -> torch.Tensor:
    """Compute (score - mean) / (std + 1e-6) over the samples for each prompt.

    DeepSeekMath (arXiv 2402.03300), equation for outcome supervision; without the division, Dr.GRPO
    (arXiv 2503.20783). The standard deviation is unbiased. The computation is in float64, and the
    result is exactly 0 if all scores in a group are equal; float32 would leave rounding errors
    above 1e-6. A group of one sample has mean 0 and std 1, so its advantage is its score.

    Args:
        scores_B: [B] one score per sample.
        groups_B: [B] integer id of each sample's prompt, in any order.

    Returns:
        [B] advantages, in the dtype of the scores.
    """
    groups = Groups.by(groups_B)
    centred = groups.centred(scores_B)
    if norm_by_std:
        centred = centred / (groups.std(scores_B)[groups.of] + 1e-6)
    return centred.to(scores_B.dtype)
