"""REINFORCE++: discounted returns of token rewards, whitened over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.whitening import whiten


@dataclass(frozen=True)
class ReinforcePlusPlusOptions:
    """Options: `gamma`, the discount per token."""

    gamma: float = 1.0


@estimator("reinforce_plus_plus", options=ReinforcePlusPlusOptions)
def reinforce_plus_plus(samples: Samples, options: ReinforcePlusPlusOptions) -> Estimate:
    """Compute whitened returns G_t = r_t + gamma G_{t+1} (arXiv 2501.03262, section 3). The rewards
    include the KL penalty.

    Tokens that the policy did not sample are skipped; returns pass through them without a discount.
    """
    from hybridflow_kernels.scans import discounted_sums

    returns = discounted_sums(
        samples.rewards, samples.lengths, gamma=options.gamma, mask_T=samples.mask
    )
    return whiten(returns, samples.mask), None
