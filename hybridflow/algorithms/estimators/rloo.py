"""REINFORCE with the mean of the other samples of a prompt as baseline."""

from __future__ import annotations

from hybridflow.algorithms.estimators._groups import Groups
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@estimator("rloo", compares_samples=True)
def rloo(samples: Samples, options: object) -> Estimate:
    """Score less the mean score of the other samples of the prompt (arXiv 2402.14740, eq. 8).

    That is n / (n - 1) times the score less the mean of all n. A sample that is alone has no
    baseline: its advantage is its score.
    """
    groups = Groups.by(samples.groups)
    factor = (groups.count / (groups.count - 1).clamp(min=1))[groups.of]
    return samples.over_tokens(
        (groups.centred(samples.scores) * factor).to(samples.scores.dtype)
    ), None
