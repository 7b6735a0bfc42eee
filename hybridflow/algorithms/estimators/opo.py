"""On-policy optimal baseline: the mean score of a prompt's samples, weighted by their lengths."""

from __future__ import annotations

from hybridflow.algorithms.estimators._groups import Groups
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@estimator("opo", compares_samples=True)
def opo(samples: Samples, options: object) -> Estimate:
    """Score less the mean of its prompt in which a sample counts by its sampled tokens (arXiv 2505.23585, eq. 6)."""
    row = (samples.lengths.new_ones(len(samples.lengths)).cumsum(0) - 1).repeat_interleave(samples.lengths)
    sampled = row[samples.mask].bincount(minlength=len(samples.lengths))
    centred = Groups.by(samples.groups).centred(samples.scores, sampled.double())
    return samples.over_tokens(centred.to(samples.scores.dtype)), None
