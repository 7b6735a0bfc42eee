"""Group policy gradient: scores minus the mean over the prompt's samples, divided by the fraction
of nonzero scores."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator


@estimator("gpg", compares_samples=True)
def gpg(samples: Samples, options: object) -> Estimate:
    """Compute alpha (score - mean), where alpha is the number of samples divided by the number of
    samples with a nonzero score (arXiv 2504.02546, eq. 6 and 7).
    """
    scores = samples.scores
    alpha = len(scores) / (scores != 0).sum().clamp(min=1)
    return samples.over_tokens(
        (Groups.by(samples.groups).centred(scores) * alpha).to(scores.dtype)
    ), None
