"""KL-Cov: policy gradient with a penalty on the few tokens with the highest covariance."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class KlCovOptions:
    """Options: the `share` of tokens that are penalised, and the strength of the penalty."""

    share: float = 0.0002
    ppo_kl_coef: float = 1.0


@policy_loss("kl_cov", options=KlCovOptions)
def kl_cov(tokens: Tokens, options: KlCovOptions) -> Loss:
    """Compute -A ratio, plus coefficient x |log-ratio| for the tokens with the largest covariance
    between advantage and log-probability (arXiv 2505.22617, eq. 12 and 13). Means are taken over
    the micro-batch."""
    advantages = tokens.columns["advantages"]
    log_ratio = tokens.log_probs - tokens.columns["old_log_probs"]
    new = tokens.log_probs.detach()
    number = min(max(int(options.share * len(advantages)), 1), len(advantages))
    covariance = (advantages - advantages.mean()) * (new - new.mean())
    penalised = new.new_zeros(len(new)).index_fill(
        0, covariance.topk(number).indices, options.ppo_kl_coef
    )
    return -advantages * log_ratio.exp() + penalised * log_ratio.abs(), {
        "actor/ppo_kl": log_ratio.detach().abs()
    }
