"""GPG: the plain policy gradient of group-relative advantages."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import Loss, Tokens, policy_loss


@policy_loss("gpg", reads=("advantages",))
def gpg(tokens: Tokens, options: object) -> Loss:
    """-A log p (arXiv 2504.02546, eq. 5). Nothing bounds how far an update moves the policy: one update a step."""
    return -tokens.columns["advantages"] * tokens.log_probs, {}
