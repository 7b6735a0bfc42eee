"""PPO's clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss


@dataclass(frozen=True)
class PpoOptions(Clipping):
    """PPO's clipping. For negative advantages, the ratio is bounded by `clip_ratio_c` (dual clip;
    None means unbounded)."""

    clip_ratio_c: float | None = 3.0


@policy_loss("ppo", options=PpoOptions)
def ppo(tokens: Tokens, options: PpoOptions) -> Loss:
    """Compute the clipped surrogate (arXiv 1707.06347, eq. 7) with optional dual clip (arXiv
    1912.09729, eq. 5).

    The log-ratio is clamped to +-20. Metrics: ppo_kl (mean of the clamped -log-ratio), pg_clipfrac,
    pg_clipfrac_lower.
    """
    old_log_probs = tokens.columns["old_log_probs"]
    advantages = tokens.columns["advantages"]
    log_ratio = (tokens.log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped, clipped = options.surrogates(advantages, ratio)
    loss = unclipped.maximum(clipped)
    is_negative = advantages < 0
    metrics = {"actor/ppo_kl": -log_ratio.detach(), "actor/pg_clipfrac": clipped > unclipped}
    if options.clip_ratio_c is None:
        return loss, metrics | {"actor/pg_clipfrac_lower": is_negative & False}
    bound = -advantages * options.clip_ratio_c
    metrics["actor/pg_clipfrac_lower"] = is_negative & (bound < loss)
    return loss.minimum(bound).where(is_negative, loss), metrics
