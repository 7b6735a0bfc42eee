"""GPG: the plain policy gradient of group-relative advantages (arXiv 2504.02546, eq. 5), identical
to REINFORCE's loss."""

from __future__ import annotations

from hybridflow.algorithms.policy_losses.base import policy_loss
from hybridflow.algorithms.policy_losses.reinforce import reinforce

policy_loss("gpg", reads=("advantages",))(reinforce)
