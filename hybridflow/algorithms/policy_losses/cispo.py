"""CISPO: the clipped ratio is a weight without gradient, so that every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class CispoOptions:
    """The weight of a token: its ratio within 1 - `clip_ratio_low` to 1 + `clip_ratio_high`."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2


@policy_loss("cispo", options=CispoOptions)
def cispo(tokens: Tokens, options: CispoOptions) -> Loss:
    """-sg(clip(ratio)) A log p (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5). The log-ratio is clamped to +-20."""
    log_ratio = (tokens.log_probs - tokens.columns["old_log_probs"]).clamp(-20.0, 20.0).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    loss = -weight * tokens.columns["advantages"] * tokens.log_probs
    return loss, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ratio != weight}
