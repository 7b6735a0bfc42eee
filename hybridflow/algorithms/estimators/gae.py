"""Generalised advantage estimation: token rewards and a critic's values become advantages and returns."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.whitening import whiten


@dataclass(frozen=True)
class GaeOptions:
    """`gamma` discounts a token; `lam` 1 sums the rewards to go, 0 looks one token ahead; `critic_lam` is that of the
    returns, None: the same."""

    gamma: float = 1.0
    lam: float = 1.0
    critic_lam: float | None = None


@estimator("gae", reads=("values",), needs_critic=True, options=GaeOptions)
def gae_estimator(samples: Samples, options: GaeOptions) -> Estimate:
    """Whitened advantages, and the returns that the critic learns from; with a lambda of its own the critic's bias does
    not depend on the policy's (decoupled GAE of VC-PPO and VAPO, arXiv 2504.05118, section 4.1: critic_lam 1)."""
    from hybridflow_kernels.scans import gae

    given = samples.rewards, samples.columns["values"], samples.lengths
    advantages, returns = gae(*given, gamma=options.gamma, lam=options.lam, mask_T=samples.mask)
    if options.critic_lam is not None:
        _, returns = gae(*given, gamma=options.gamma, lam=options.critic_lam, mask_T=samples.mask)
    return whiten(advantages, samples.mask), returns
