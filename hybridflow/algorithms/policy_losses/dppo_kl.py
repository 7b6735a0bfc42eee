"""DPPO with the Kullback-Leibler divergence of a token against all others as its bound."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class DppoKlOptions:
    """Largest divergence of a token with positive advantage (`clip_ratio_high`) and of others, and the largest weight
    of a token."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    largest_weight: float = 20.0


@policy_loss("dppo_kl", options=DppoKlOptions)
def dppo_kl(tokens: Tokens, options: DppoKlOptions) -> Loss:
    """-sg(ratio) A log p where the divergence of the token is within the bound or the update leads back
    (DPPO-Binary-KL, arXiv 2602.04879, section 4.2), 0 elsewhere."""
    advantages, old = tokens.columns["advantages"], tokens.columns["old_log_probs"]
    new = tokens.log_probs.detach()
    log_ratio, p, p_old = (new - old).clamp(-20.0, 20.0), new.exp(), old.exp()
    divergence = p_old * (old - new) + (1 - p_old) * ((1 - p_old + 1e-8) / (1 - p + 1e-8)).log()
    rising = (divergence <= options.clip_ratio_high) | (p <= p_old)
    kept = rising.where(advantages > 0, (divergence <= options.clip_ratio_low) | (p >= p_old))
    weight = log_ratio.exp().clamp(max=options.largest_weight) * kept
    return -advantages * weight * tokens.log_probs, {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": ~kept}
