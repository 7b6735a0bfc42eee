"""GMPO: the geometric mean of a sequence's token ratios, each clipped in the log domain."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss


@policy_loss("gmpo", options=Clipping, aggregations=("seq-mean-token-mean",))
def gmpo(tokens: Tokens, options: Clipping) -> Loss:
    """Compute -A exp(mean of a sequence's clipped log-ratios), which is the same for all tokens in
    a sequence (arXiv 2507.20673, eq. 4).

    A token's log-ratio is clipped to -`clip_ratio_low` and `clip_ratio_high`; the paper uses 0.4
    for both. As in PPO, only the side that would move the policy further away is clipped. A is the
    mean of the sequence's advantages.
    """
    advantages = tokens.columns["advantages"]
    log_ratio = tokens.log_probs - tokens.columns["old_log_probs"]
    bounded = log_ratio.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    sign = advantages.sign()
    kept = sign * (sign * log_ratio).minimum(sign * bounded)
    ratio = tokens.mean_of_sequences(kept).exp()
    clipped = (log_ratio != bounded).detach()
    metrics = {
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/pg_clipfrac": clipped & (advantages > 0),
        "actor/pg_clipfrac_lower": clipped & (advantages < 0),
    }
    return -tokens.mean_of_sequences(advantages) * ratio, metrics
