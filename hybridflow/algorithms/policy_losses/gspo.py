"""GSPO: one probability ratio per sequence, shared by all of its tokens."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss


@policy_loss("gspo", options=Clipping)
def gspo(tokens: Tokens, options: Clipping) -> Loss:
    """Compute the clipped surrogate of s_i = exp(mean of a sequence's log-ratios), with a gradient
    through each token (GSPO-token, arXiv 2507.18071, eq. 13 and 14). The paper uses
    actor.loss_agg_mode=seq-mean-token-mean and clips to 1 - 3e-4 and 1 + 4e-4.

    A sequence's log-ratio is clamped to at most 10.
    """
    advantages = tokens.columns["advantages"]
    constant = tokens.log_probs.detach()
    log_ratio = constant - tokens.columns["old_log_probs"]
    whole = tokens.mean_of_sequences(log_ratio)
    ratio = (tokens.log_probs - constant + whole).clamp(max=10.0).exp()
    unclipped, clipped = options.surrogates(advantages, ratio)
    metrics = {"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": clipped > unclipped}
    return unclipped.maximum(clipped), metrics
