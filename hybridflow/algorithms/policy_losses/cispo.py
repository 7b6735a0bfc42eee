"""CISPO: the clipped ratio serves as a constant weight, so no token loses its gradient."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss


@policy_loss("cispo", options=Clipping)
def cispo(tokens: Tokens, options: Clipping) -> Loss:
    """Compute -sg(clip(ratio)) A log p (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5). The log-ratio
    is clamped to +-20."""
    log_ratio = tokens.log_probs.detach() - tokens.columns["old_log_probs"]
    log_ratio = log_ratio.clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    loss = -weight * tokens.columns["advantages"] * tokens.log_probs
    return loss, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ratio != weight}
