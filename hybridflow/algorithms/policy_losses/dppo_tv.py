"""DPPO: tokens whose probability moved too far in the direction of their advantage have no
gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DppoOptions(Clipping):
    """How far a token with positive advantage (`clip_ratio_high`) and one with another may have
    moved, and the largest weight of a token."""

    largest_weight: float = 20.0


@policy_loss("dppo_tv", options=DppoOptions)
def dppo_tv(tokens: Tokens, options: DppoOptions) -> Loss:
    """-sg(ratio) A log p where the total variation p - p_old of the token is within the bounds
    (DPPO-Binary-TV, arXiv 2602.04879, section 4.2), 0 elsewhere."""
    moved = tokens.log_probs.detach().exp() - tokens.columns["old_log_probs"].exp()
    rising = tokens.columns["advantages"] > 0
    return weighted(
        tokens,
        (moved <= options.clip_ratio_high).where(rising, moved >= -options.clip_ratio_low),
        options,
    )


def weighted(tokens: Tokens, kept: torch.Tensor, options: DppoOptions) -> Loss:
    """-sg(ratio) A log p at the tokens that are `kept` [T], 0 elsewhere. The log-ratio is clamped
    to +-20."""
    log_ratio = (tokens.log_probs.detach() - tokens.columns["old_log_probs"]).clamp(-20.0, 20.0)
    weight = log_ratio.exp().clamp(max=options.largest_weight) * kept
    loss = -tokens.columns["advantages"] * weight * tokens.log_probs
    return loss, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ~kept}
