"""GPG: the plain policy gradient of group-relative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.algorithms.policy_losses.base import Tokens, policy_loss

if TYPE_CHECKING:
    import torch


@policy_loss("gpg", reads=("advantages",))
def gpg(tokens: Tokens, options: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A log p (arXiv 2504.02546, eq. 5). Nothing bounds how far an update moves the policy: one update a step."""
    return -tokens.columns["advantages"] * tokens.log_probs, {}
