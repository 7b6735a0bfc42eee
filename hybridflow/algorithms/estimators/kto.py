"""KTO: each answer is classified as desirable or undesirable, so no pairs are needed."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators._preferences import AGGREGATIONS, READS, Beta, log_ratios
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@dataclass(frozen=True)
class KtoOptions(Beta):
    """Options: the minimum score of a desirable answer, and the weights of desirable and
    undesirable answers."""

    threshold: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@estimator("kto", reads=READS, options=KtoOptions, aggregations=AGGREGATIONS, preferences=True)
def kto(samples: Samples, options: KtoOptions) -> Estimate:
    """Compute the gradient of 1 - sigmoid(+-beta (log-ratio - z)), with + for desirable answers
    (arXiv 2402.01306, eq. 8).

    z is the mean log-ratio over the batch, at least 0 and without gradient. With answers sampled
    from the policy, this estimates the divergence from the reference directly; the paper needs
    mismatched pairs for that.
    """
    ratios = log_ratios(samples)
    desirable = samples.scores >= options.threshold
    gain = (options.beta * (ratios - ratios.mean().clamp(min=0))).sigmoid()
    slope = options.beta * gain * (1 - gain)
    advantages = (options.desirable_weight * slope).where(
        desirable, -options.undesirable_weight * slope
    )
    return samples.over_tokens(advantages.to(samples.scores.dtype)), None
