"""Whether the advantage estimator, the policy loss and the trackers exist, take the given options, and fit the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hybridflow.config.entries import ESTIMATORS, TRACKERS, estimator_options, policy_loss_options
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError


def problems(config: RunConfig) -> Iterator[str]:
    """Every problem of the names and options as one line. Imports what the configuration names."""
    builds: list[Callable[[], object]] = [
        lambda: estimator_options(config.algorithm),
        lambda: policy_loss_options(config.actor),
        *(partial(TRACKERS.get, name) for name in config.trainer.loggers),
    ]
    for build in builds:
        try:
            build()
        except ConfigError as error:
            yield str(error)


def sample_problems(config: RunConfig) -> Iterator[str]:
    """An estimator that compares the samples of a prompt needs two of them."""
    name = config.algorithm.adv_estimator
    if config.rollout.n == 1 and ESTIMATORS.get(name).compares_samples:
        others = [other for other in ESTIMATORS.names() if not ESTIMATORS.get(other).compares_samples]
        yield (
            f"rollout.n=1 with algorithm.adv_estimator={name}, which compares the samples of a prompt: with one sample "
            f"the advantage is the score itself; set rollout.n to 2 or more, or choose {' or '.join(others)}"
        )
