"""SAPO: a smooth gate on the ratio instead of clipping."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@dataclass(frozen=True)
class SapoOptions:
    """Options: how quickly the gate closes as the ratio moves away from 1, set separately for
    tokens with positive and with negative advantages.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05


@policy_loss("sapo", options=SapoOptions, aggregations=("seq-mean-token-mean",))
def sapo(tokens: Tokens, options: SapoOptions) -> Loss:
    """Compute -A sigmoid(tau (ratio - 1)) 4 / tau (arXiv 2511.20347, eq. 5 and 6). At ratio 1 its
    gradient equals that of PPO."""
    advantages = tokens.columns["advantages"]
    log_ratio = (tokens.log_probs - tokens.columns["old_log_probs"]).clamp(-20.0, 20.0)
    tau = (advantages * 0.0 + options.tau_neg).where(advantages <= 0, options.tau_pos)
    gate = (tau * (log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
    return -advantages * gate, {"actor/ppo_kl": -log_ratio.detach()}
