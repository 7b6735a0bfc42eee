"""REINFORCE with the mean score over the prompt's other samples as the baseline."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator


@estimator("rloo", compares_samples=True)
def rloo(samples: Samples, options: object) -> Estimate:
    """Compute the score minus the mean score over the prompt's other samples (arXiv 2402.14740, eq.
    8).

    This equals n / (n - 1) times the score minus the mean of all n. A single sample has no
    baseline: its advantage is its score.
    """
    groups = Groups.by(samples.groups)
    factor = (groups.count / (groups.count - 1).clamp(min=1))[groups.of]
    return samples.over_tokens(
        (groups.centred(samples.scores) * factor).to(samples.scores.dtype)
    ), None
