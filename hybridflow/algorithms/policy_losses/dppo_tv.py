"""DPPO: tokens whose probability has moved too far in the direction of their advantage get no
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DppoOptions(Clipping):
    """Options: the maximum change in probability of a token with positive advantage
    (`clip_ratio_high`) and of any other token (`clip_ratio_low`), and the maximum weight of a
    token."""

    largest_weight: float = 20.0


@policy_loss("dppo_tv", options=DppoOptions)
def dppo_tv(tokens: Tokens, options: DppoOptions) -> Loss:
    """Compute -sg(ratio) A log p if the token's total variation p - p_old is within the bounds,
    else 0 (DPPO-Binary-TV, arXiv 2602.04879, section 4.2)."""
    moved = tokens.log_probs.detach().exp() - tokens.columns["old_log_probs"].exp()
    rising = tokens.columns["advantages"] > 0
    return weighted(
        tokens,
        (moved <= options.clip_ratio_high).where(rising, moved >= -options.clip_ratio_low),
        options,
    )


def weighted(tokens: Tokens, kept: torch.Tensor, options: DppoOptions) -> Loss:
    """Compute -sg(ratio) A log p for the tokens in `kept` [T], and 0 for all others. The log-ratio
    is clamped to +-20."""
    log_ratio = (tokens.log_probs.detach() - tokens.columns["old_log_probs"]).clamp(-20.0, 20.0)
    weight = log_ratio.exp().clamp(max=options.largest_weight) * kept
    loss = -tokens.columns["advantages"] * weight * tokens.log_probs
    return loss, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ~kept}
