"""Policy losses and penalties over packed response tokens, and how tokens are aggregated.

Losses return (sum, count): one place scales by the global count over data-parallel ranks and micro-batches, so the
gradient does not depend on how a batch was cut. T is the number of response tokens of a micro-batch, S the number of
its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class ResponseTokens(Protocol):
    """What a loss sees of a micro-batch besides the model's results."""

    @property
    def lengths(self) -> torch.Tensor:
        """[S] response tokens of each sequence."""
        ...

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """Per-response-token columns [T]."""
        ...


# (log-probs [T], entropies [T] or None, micro-batch) -> (loss sum, count, metric sums with counts)
LossFunction = Callable[[torch.Tensor, torch.Tensor | None, ResponseTokens], tuple[torch.Tensor, torch.Tensor, Metrics]]


def aggregate(values_T: torch.Tensor, lengths_S: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) of per-token values so that the global mean is sum / count over all micro-batches and ranks.

    Args:
        values_T: [T] per-token values, sequences one after another.
        lengths_S: [S] response tokens of each sequence; sequences of length 0 take no part.
        mode: token-mean | seq-mean-token-sum | seq-mean-token-mean.
    """
    if mode == "token-mean":
        return values_T.sum(), lengths_S.sum()
    sequence = torch.repeat_interleave(torch.arange(len(lengths_S), device=values_T.device), lengths_S)
    sums = values_T.new_zeros(len(lengths_S)).index_add(0, sequence, values_T)
    if mode == "seq-mean-token-mean":
        sums = sums / lengths_S.clamp(min=1)
    elif mode != "seq-mean-token-sum":
        raise ValueError(f"loss_agg_mode {mode!r}")
    return sums.sum(), (lengths_S > 0).sum()


def ppo_token_loss(
    log_probs_T: torch.Tensor,
    old_log_probs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> tuple[torch.Tensor, Metrics]:
    """Clipped surrogate (PPO, arXiv 1707.06347, eq. 7) with optional dual clip (arXiv 1912.09729, eq. 5).

    Returns:
        [T] loss per token, and token sums with counts: ppo_kl (mean of old - new), pg_clipfrac, pg_clipfrac_lower.
    """
    log_ratio = (log_probs_T - old_log_probs_T).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages_T * ratio
    clipped = -advantages_T * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(loss, dtype=torch.bool)
    if clip_c is not None:
        bound = -advantages_T * clip_c
        lower = (advantages_T < 0) & (bound < loss)
        loss = torch.where(advantages_T < 0, torch.minimum(loss, bound), loss)
    count = torch.tensor(loss.numel())
    metrics = {
        "actor/ppo_kl": ((old_log_probs_T - log_probs_T).detach().sum(), count),
        "actor/pg_clipfrac": ((clipped > unclipped).sum(), count),
        "actor/pg_clipfrac_lower": (lower.sum(), count),
    }
    return loss, metrics


def kl_penalty(log_probs_T: torch.Tensor, ref_log_probs_T: torch.Tensor, kind: str) -> torch.Tensor:
    """[T] estimate of KL(policy || reference) from the sampled tokens alone (Schulman, "Approximating KL divergence").

    k1 = d; abs = |d|; k2 = d^2/2; k3 = exp(-d) + d - 1, where d = log p - log p_ref, clamped to +-20 and the k3 result
    to +-10.
    """
    difference = (log_probs_T - ref_log_probs_T).clamp(-20.0, 20.0)
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        return ((-difference).exp() + difference - 1).clamp(-10.0, 10.0)
    raise ValueError(f"kl_loss_type {kind!r}")
