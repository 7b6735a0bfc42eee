"""REINFORCE++ with the mean score over a prompt's samples as the baseline."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator
from hybridflow.algorithms.whitening import whiten


@estimator("reinforce_plus_plus_baseline", compares_samples=True)
def reinforce_plus_plus_baseline(samples: Samples, options: object) -> Estimate:
    """Compute the score minus the mean over its prompt's samples, whitened over the tokens in the
    batch (arXiv 2501.03262, section 3.3)."""
    centred = Groups.by(samples.groups).centred(samples.scores).to(samples.scores.dtype)
    return whiten(samples.over_tokens(centred), samples.mask), None
