"""Direct reward optimisation: policy gradient with a quadratic penalty on the log-ratio."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class DroOptions:
    """Options: the strength of the quadratic penalty."""

    beta: float = 0.1


@policy_loss("dro", options=DroOptions)
def dro(tokens: Tokens, options: DroOptions) -> Loss:
    """Compute -(A log p - beta / 2 (log p - log p_old)^2) (arXiv 2405.19107, eq. 8, per token)."""
    log_ratio = tokens.log_probs - tokens.columns["old_log_probs"]
    loss = -(tokens.log_probs * tokens.columns["advantages"] - 0.5 * options.beta * log_ratio**2)
    return loss, {"actor/ppo_kl": -log_ratio.detach()}
