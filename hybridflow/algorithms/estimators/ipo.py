"""IPO on each prompt's best and worst answers. The answers are either sampled from the policy or
read from a data set of pairs."""

from __future__ import annotations

from hybridflow.algorithms.estimators._preferences import (
    AGGREGATIONS,
    READS,
    Beta,
    Pairs,
    log_ratios,
)
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator, sums_of_rows


@estimator(
    "ipo",
    reads=READS,
    compares_samples=True,
    options=Beta,
    aggregations=AGGREGATIONS,
    preferences=True,
)
def ipo(samples: Samples, options: Beta) -> Estimate:
    """Compute the gradient of (margin - 1 / (2 beta))^2, where margin is the difference between the
    mean log-ratios per token (arXiv 2310.12036, eq. 17; means over tokens as in TRL)."""
    pairs = Pairs.of(samples)
    lengths = sums_of_rows(samples.mask.double(), samples.lengths).clamp(min=1)
    ratios = log_ratios(samples) / lengths
    margin = ratios[pairs.chosen] - ratios[pairs.rejected]
    weight = 1 / options.beta - 2 * margin
    return pairs.advantages(
        samples, weight / lengths[pairs.chosen], -weight / lengths[pairs.rejected]
    ), None
