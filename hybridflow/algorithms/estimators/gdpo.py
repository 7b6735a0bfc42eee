"""GDPO: several rewards per sample, each normalised within its prompt before they are summed."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.estimators.grpo import grpo_advantages
from hybridflow.algorithms.whitening import whiten
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class GdpoOptions:
    """Options: `rewards`, the names of additional numbers that the reward function returns; their
    `weights` (empty means 1 each); and whether to divide each reward by the standard deviation of
    its group."""

    rewards: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    norm_adv_by_std: bool = True


@estimator("gdpo", compares_samples=True, options=GdpoOptions)
def gdpo(samples: Samples, options: GdpoOptions) -> Estimate:
    """Compute the whitened, weighted sum of each reward's group-relative advantages (arXiv
    2601.05242, eq. 4 to 6).

    Raises:
        ConfigError: no reward is named, the reward function does not return a named reward, or the
            number of weights does not match.
    """
    key = "algorithm.adv_estimator_options"
    if not options.rewards or len(options.weights) not in (0, len(options.rewards)):
        raise ConfigError(
            f"{key}: gdpo requires rewards=[NAME, ...] and either no weights or one per reward, "
            f"got rewards={options.rewards} and weights={options.weights}"
        )
    if missing := [name for name in options.rewards if name not in samples.parts]:
        raise ConfigError(
            f"{key}.rewards names {missing[0]!r}, which the reward did not return as a number for "
            f"every sample (it returned: {', '.join(samples.parts) or 'only the score'})"
        )
    weights = options.weights or (1.0,) * len(options.rewards)
    total = samples.scores.double() * 0.0
    for name, weight in zip(options.rewards, weights, strict=True):
        part = samples.parts[name].double()
        total += weight * grpo_advantages(part, samples.groups, norm_by_std=options.norm_adv_by_std)
    return whiten(samples.over_tokens(total.to(samples.scores.dtype)), samples.mask), None
