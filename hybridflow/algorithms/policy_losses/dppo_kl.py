"""DPPO, with a bound on the binary Kullback-Leibler divergence (a token against all others)."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss
from hybridflow.algorithms.policy_losses.dppo_tv import DppoOptions, weighted


@policy_loss("dppo_kl", options=DppoOptions)
def dppo_kl(tokens: Tokens, options: DppoOptions) -> Loss:
    """Compute -sg(ratio) A log p if the token's divergence is within the bound or the update would
    reduce it, else 0 (DPPO-Binary-KL, arXiv 2602.04879, section 4.2)."""
    new = tokens.log_probs.detach()
    old = tokens.columns["old_log_probs"]
    p = new.exp()
    p_old = old.exp()
    ratio_of_others = (1 - p_old + 1e-8) / (1 - p + 1e-8)
    divergence = p_old * (old - new) + (1 - p_old) * ratio_of_others.log()
    rising = (divergence <= options.clip_ratio_high) | (p <= p_old)
    falling = (divergence <= options.clip_ratio_low) | (p >= p_old)
    is_better = tokens.columns["advantages"] > 0
    return weighted(tokens, rising.where(is_better, falling), options)
