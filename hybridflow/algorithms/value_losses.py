"""Losses for scalar heads: the critic's clipped regression and the reward model's pairwise
comparison."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridflow.algorithms.losses import Metrics


def value_token_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    *,
    clip: float | None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute half the squared error of the value or of the value clipped to old +- clip, whichever
    error is larger (PPO2; arXiv 2005.12729, section 3).

    Returns:
        [T] loss per token, and sums over tokens with their counts: critic/vf_clipfrac,
        critic/vpred_mean.
    """
    loss = (values_T - returns_T) ** 2
    held = torch.zeros_like(loss, dtype=torch.bool)
    if clip is not None:
        clipped = (values_T.clamp(old_values_T - clip, old_values_T + clip) - returns_T) ** 2
        held = clipped > loss
        loss = torch.maximum(loss, clipped)
    count = torch.tensor(loss.numel())
    return 0.5 * loss, {
        "critic/vf_clipfrac": (held.sum(), count),
        "critic/vpred_mean": (values_T.detach().sum(), count),
    }


def preference_loss(scores_S: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """Compute -log sigmoid(chosen - rejected) for each pair (Bradley-Terry; arXiv 2203.02155, eq.
    1).

    Args:
        scores_S: [2 n] scores of consecutive pairs: chosen, rejected, chosen, rejected, ...

    Returns:
        [n] loss per pair, and the (sum, count) of each metric: reward/accuracy (the chosen response
        has the higher score) and reward/margin (difference of the scores).
    """
    chosen, rejected = scores_S.view(-1, 2).unbind(-1)
    difference = chosen - rejected
    count = torch.tensor(difference.numel())
    return -F.logsigmoid(difference), {
        "reward/accuracy": ((difference.detach() > 0).sum(), count),
        "reward/margin": (difference.detach().sum(), count),
    }
