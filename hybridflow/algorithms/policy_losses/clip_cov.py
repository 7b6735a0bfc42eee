"""Clip-Cov: PPO's clipped surrogate, in which a few tokens with high covariance have no
gradient."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Clipping, Loss, Tokens, policy_loss


@dataclass(frozen=True)
class ClipCovOptions(Clipping):
    """PPO's clipping, and the `share` of tokens that get no gradient. They are chosen from those
    whose covariance between advantage and log-probability is between `lower` and `upper`."""

    share: float = 0.0002
    lower: float = 1.0
    upper: float = 5.0


@policy_loss("clip_cov", options=ClipCovOptions)
def clip_cov(tokens: Tokens, options: ClipCovOptions) -> Loss:
    """Compute PPO's loss without the tokens that would lower the entropy most (arXiv 2505.22617,
    eq. 10 and 11).

    Means are taken over the micro-batch. If there are more candidates than needed, evenly spaced
    ones are excluded, so that ranks that share a sequence choose the same tokens without a shared
    random generator.
    """
    advantages = tokens.columns["advantages"]
    log_ratio = tokens.log_probs - tokens.columns["old_log_probs"]
    unclipped, clipped = options.surrogates(advantages, log_ratio.exp())
    new = tokens.log_probs.detach()
    covariance = (advantages - advantages.mean()) * (new - new.mean())
    wanted = (
        (covariance > options.lower)
        & (covariance < options.upper)
        & ~(clipped > unclipped).detach()
    )
    candidates = wanted.nonzero()[:, 0]
    number = min(max(int(options.share * len(new)), 1), len(candidates))
    chosen = (
        candidates[[i * len(candidates) // number for i in range(number)]] if number else candidates
    )
    kept = new.new_ones(len(new)).index_fill(0, chosen, 0.0)
    return unclipped.maximum(clipped) * kept, {
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/pg_clipfrac": kept == 0,
    }
