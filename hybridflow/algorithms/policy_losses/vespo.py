"""VESPO: each sequence is weighted by a smooth function of its ratio that peaks near the sampling
policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import rows_of_tokens, sums_of_rows
from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss

# bounds of a sequence's log-ratio; a token's are +-20
_LEAST = math.log(1e-8)
_MOST = 20.0


@dataclass(frozen=True)
class VespoOptions:
    """Options: exponent `k` and decay `lambda` of the weight, for nonnegative (`pos`) and negative
    (`neg`) advantages. A larger k reduces the weight of ratios below 1; a larger lambda reduces the
    weight of ratios above 1.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0


@policy_loss("vespo", options=VespoOptions)
def vespo(tokens: Tokens, options: VespoOptions) -> Loss:
    """Compute -phi(w) A log p with phi(w) = w^k exp(lambda (1 - w)), where w is the product of a
    sequence's ratios (arXiv 2602.10693). phi has no gradient, and is 1 if the policy is unchanged.
    Matches TRL 1.16.

    Metrics: ppo_kl (mean of -log-ratio), vespo_weight (phi).
    """
    advantages = tokens.columns["advantages"]
    log_ratio = tokens.log_probs.detach() - tokens.columns["old_log_probs"]
    whole = sums_of_rows(log_ratio.clamp(-20.0, 20.0), tokens.lengths).clamp(_LEAST, _MOST)
    log_w = whole[rows_of_tokens(tokens.lengths)]
    positive = advantages >= 0
    k = log_w.new_full(log_w.shape, options.k_pos).where(positive, options.k_neg)
    decay = log_w.new_full(log_w.shape, options.lambda_pos).where(positive, options.lambda_neg)
    phi = (k * log_w + decay * (1 - log_w.exp())).exp()
    loss = -phi * advantages * tokens.log_probs
    return loss, {"actor/ppo_kl": -log_ratio, "actor/vespo_weight": phi}
