"""Generalised advantage estimation: token rewards and a critic's values become advantages and returns."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.whitening import whiten


@dataclass(frozen=True)
class GaeOptions:
    """`gamma` discounts a token; `lam` 1 sums the rewards to go, 0 looks one token ahead."""

    gamma: float = 1.0
    lam: float = 1.0


@estimator("gae", reads=("values",), needs_critic=True, options=GaeOptions)
def gae_estimator(samples: Samples, options: GaeOptions) -> Estimate:
    """Whitened advantages, and the returns that the critic learns from."""
    from hybridflow_kernels.scans import gae

    advantages, returns = gae(
        samples.rewards,
        samples.columns["values"],
        samples.lengths,
        gamma=options.gamma,
        lam=options.lam,
        mask_T=samples.mask,
    )
    return whiten(advantages, samples.mask), returns
