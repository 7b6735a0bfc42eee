"""GDPO: several rewards of a sample, each normalised within its prompt before they are added."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.estimators.grpo import grpo_advantages
from hybridflow.algorithms.whitening import whiten
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class GdpoOptions:
    """Names of the numbers that the reward returns beside the score, `weights` of them (empty: 1
    each), and whether each is divided by the standard deviation of its group."""

    rewards: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    norm_adv_by_std: bool = True


@estimator("gdpo", compares_samples=True, options=GdpoOptions)
def gdpo(samples: Samples, options: GdpoOptions) -> Estimate:
    """Whitened weighted sum of the group-relative advantages of each reward (arXiv 2601.05242, eq.
    4 to 6).

    Raises:
        ConfigError: no reward is named, one is missing in what the reward function returned, or
            weights do not match.
    """
    key = "algorithm.adv_estimator_options"
    if not options.rewards or len(options.weights) not in (0, len(options.rewards)):
        raise ConfigError(
            f"{key}: gdpo needs rewards=[NAME, ...] and as many weights or none, got "
            f"rewards={options.rewards} and weights={options.weights}"
        )
    if missing := [name for name in options.rewards if name not in samples.parts]:
        raise ConfigError(
            f"{key}.rewards names {missing[0]!r}, which the reward did not return as a number for "
            f"every sample (it returned: {', '.join(samples.parts) or 'the score alone'})"
        )
    weights = options.weights or (1.0,) * len(options.rewards)
    total = samples.scores.double() * 0.0
    for name, weight in zip(options.rewards, weights, strict=True):
        part = samples.parts[name].double()
        total += weight * grpo_advantages(part, samples.groups, norm_by_std=options.norm_adv_by_std)
    return whiten(samples.over_tokens(total.to(samples.scores.dtype)), samples.mask), None
