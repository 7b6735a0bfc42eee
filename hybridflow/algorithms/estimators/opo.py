"""On-policy optimal baseline: the length-weighted mean score over a prompt's samples."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator, sums_of_rows


@estimator("opo", compares_samples=True)
def opo(samples: Samples, options: object) -> Estimate:
    """Compute the score minus the mean over the prompt's samples, each weighted by its number of
    sampled tokens (arXiv 2505.23585, eq. 6)."""
    sampled = sums_of_rows(samples.mask.double(), samples.lengths)
    centred = Groups.by(samples.groups).centred(samples.scores, sampled)
    return samples.over_tokens(centred.to(samples.scores.dtype)), None
