"""DPO on each prompt's best and worst answers. The answers are either sampled from the policy
(online DPO) or read from a data set of pairs."""

from __future__ import annotations

from hybridflow.algorithms.estimators._preferences import (
    AGGREGATIONS,
    READS,
    Beta,
    Pairs,
    log_ratios,
)
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@estimator(
    "dpo",
    reads=READS,
    compares_samples=True,
    options=Beta,
    aggregations=AGGREGATIONS,
    preferences=True,
)
def dpo(samples: Samples, options: Beta) -> Estimate:
    """Compute beta sigmoid(-beta margin) for the chosen answer and its negative for the rejected
    one: the gradient of -log sigmoid(beta margin), where margin is the difference between their
    log-ratios (arXiv 2305.18290, section 4; pairs sampled from the policy: arXiv 2402.04792)."""
    pairs = Pairs.of(samples)
    ratios = log_ratios(samples)
    margin = ratios[pairs.chosen] - ratios[pairs.rejected]
    weight = options.beta * (-options.beta * margin).sigmoid()
    return pairs.advantages(samples, weight, -weight), None
