"""Generalised advantage estimation: advantages and returns from token rewards and a critic's
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator, sums_of_rows
from hybridflow.algorithms.whitening import whiten

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GaeOptions:
    """`gamma` is the discount per token. `lam`: 1 sums the rewards to go, 0 looks one token ahead.
    `critic_lam` is the lambda of the returns; None means `lam`. `length_alpha` replaces `lam` with
    a lambda that grows with the length of the answer. `whiten`: false leaves the advantages in the
    unit of the rewards.
    """

    gamma: float = 1.0
    lam: float = 1.0
    critic_lam: float | None = None
    length_alpha: float | None = None
    whiten: bool = True


@estimator("gae", reads=("values",), needs_critic=True, options=GaeOptions)
def gae_estimator(samples: Samples, options: GaeOptions) -> Estimate:
    """Compute advantages, whitened by default, and the returns that the critic is trained on.

    With a separate lambda, the critic's bias does not depend on the policy's (decoupled GAE in
    VC-PPO and VAPO, arXiv 2504.05118, section 4.1: critic_lam 1). The policy's lambda may depend on
    the l sampled tokens of an answer: 1 - 1 / (alpha l), or 0 if alpha l is below 1, so that errors
    propagate over about alpha l tokens (length-adaptive GAE, section 4.2: length_alpha 0.05).
    """
    from hybridflow_kernels.scans import gae

    given = samples.rewards, samples.columns["values"], samples.lengths
    lam: float | torch.Tensor = options.lam
    if options.length_alpha is not None:
        sampled = sums_of_rows(samples.mask.float(), samples.lengths)
        lam = 1 - 1 / (options.length_alpha * sampled).clamp(min=1.0)
    advantages, returns = gae(*given, gamma=options.gamma, lam=lam, mask_T=samples.mask)
    critic_lam = options.lam if options.critic_lam is None else options.critic_lam
    if critic_lam is not lam:
        _, returns = gae(*given, gamma=options.gamma, lam=critic_lam, mask_T=samples.mask)
    return whiten(advantages, samples.mask) if options.whiten else advantages, returns
