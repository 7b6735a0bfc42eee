"""Rewards become advantages."""

from __future__ import annotations

import torch


def grpo_advantages(
    scores_B: torch.Tensor, groups_B: torch.Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Group-relative advantages: (score - mean) / (std + eps) within the samples of one prompt.

    DeepSeekMath (arXiv 2402.03300), equation for outcome supervision; without the division, Dr.GRPO (arXiv 2503.20783).
    The standard deviation is the unbiased one. A group of one sample has mean 0 and std 1, so its advantage is its
    score.

    Args:
        scores_B: [B] one score a sample.
        groups_B: [B] integer id of the prompt each sample belongs to, in any order.

    Returns:
        [B] fp32.
    """
    scores = scores_B.float()
    _, group = torch.unique(groups_B, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    count = scores.new_zeros(num_groups).index_add_(0, group, torch.ones_like(scores))
    mean = scores.new_zeros(num_groups).index_add_(0, group, scores) / count
    mean = torch.where(count > 1, mean, torch.zeros_like(mean))
    centred = scores - mean[group]
    if not norm_by_std:
        return centred
    variance = scores.new_zeros(num_groups).index_add_(0, group, centred**2) / (count - 1).clamp(min=1)
    std = torch.where(count > 1, variance.sqrt(), torch.ones_like(variance))
    return centred / (std[group] + eps)
