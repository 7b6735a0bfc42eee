"""GSPO: the ratio of whole sequences, one for all tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class GspoOptions:
    """How far the ratio of a sequence counts: 1 - `clip_ratio_low` to 1 + `clip_ratio_high`. The paper takes 3e-4 and
    4e-4."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2


@policy_loss("gspo", options=GspoOptions)
def gspo(tokens: Tokens, options: GspoOptions) -> Loss:
    """The clipped surrogate of s_i = exp(mean of a sequence's log-ratios), whose gradient flows through each token
    (GSPO-token, arXiv 2507.18071, eq. 13 and 14). The paper takes actor.loss_agg_mode=seq-mean-token-mean.

    The log-ratio of a sequence is at most 10.
    """
    advantages, log_ratio = tokens.columns["advantages"], tokens.log_probs - tokens.columns["old_log_probs"]
    whole = tokens.mean_of_sequences(log_ratio.detach())
    ratio = (tokens.log_probs - tokens.log_probs.detach() + whole).clamp(max=10.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    metrics = {"actor/ppo_kl": -log_ratio.detach(), "actor/pg_clipfrac": clipped > unclipped}
    return unclipped.maximum(clipped), metrics
