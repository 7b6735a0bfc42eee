"""DPPO: tokens whose probability moved too far in the direction of their advantage have no gradient."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class DppoTvOptions:
    """How much a token's probability may have fallen (`clip_ratio_low`) or risen, and the largest weight of a token."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    largest_weight: float = 20.0


@policy_loss("dppo_tv", options=DppoTvOptions)
def dppo_tv(tokens: Tokens, options: DppoTvOptions) -> Loss:
    """-sg(ratio) A log p where the total variation p - p_old of the token is within the bounds (DPPO-Binary-TV, arXiv
    2602.04879, section 4.2), 0 elsewhere."""
    advantages, old = tokens.columns["advantages"], tokens.columns["old_log_probs"]
    new = tokens.log_probs.detach()
    log_ratio = (new - old).clamp(-20.0, 20.0)
    moved = new.exp() - old.exp()
    kept = (moved <= options.clip_ratio_high).where(advantages > 0, moved >= -options.clip_ratio_low)
    weight = log_ratio.exp().clamp(max=options.largest_weight) * kept
    return -advantages * weight * tokens.log_probs, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ~kept}
