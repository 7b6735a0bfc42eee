"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@policy_loss("reinforce", reads=("advantages",))
def reinforce(tokens: Tokens, options: object) -> Loss:
    """Compute -A log p (arXiv 2402.14740, eq. 3, per token). Nothing limits how far an update moves
    the policy, so use only one update per step."""
    return -tokens.columns["advantages"] * tokens.log_probs, {}
