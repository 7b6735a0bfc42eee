"""ReMax: uses the score of the greedy answer to the same prompt as the baseline."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@estimator("remax", reads=("greedy_scores",))
def remax(samples: Samples, options: object) -> Estimate:
    """Compute the rewards to go minus `greedy_scores` [B], the score of the greedy answer (arXiv
    2310.10505, eq. 5)."""
    from hybridflow_kernels.scans import discounted_sums

    returns = discounted_sums(samples.rewards, samples.lengths, gamma=1.0, mask_T=samples.mask)
    return returns - samples.over_tokens(samples.columns["greedy_scores"]), None
