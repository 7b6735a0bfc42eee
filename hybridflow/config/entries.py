"""Declarations and registries of advantage estimators, policy losses, trackers and data
preparations.

The checks, `--explain`, a run's roles and the columns of its batches are derived from them. Entries
are in `hybridflow/algorithms`, `hybridflow/observe/trackers` and `hybridflow/data/prepare/tasks`;
this package contains only the parts needed before torch is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridflow.config.build import build_options
from hybridflow.config.keys import ESTIMATOR, FLOW, POLICY_LOSS, PREPARE_TASK, TRACKER
from hybridflow.config.registry import Registry
from hybridflow.config.schema import ActorConfig, AlgorithmConfig
from hybridflow.errors import ConfigError

# statistics of actor.rollout_correction.reject: per token, or over the tokens of a sequence
STATISTICS = (
    *(
        f"{level}_{kind}"
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
        for kind in ("k1", "k2", "k3")
    ),
    "seq_min_k1",
)


@dataclass(frozen=True)
class NoOptions:
    """Options class for entries that have no options."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator. `hybridflow.algorithms.estimators.base` defines the interface of the
    function that computes the advantages.

    Attributes:
        reads: per-token columns that it needs in addition to the scores, e.g. "values".
        needs_critic: True if it needs a critic, which computes `values` and is trained on the
            returns.
        compares_samples: True if it needs at least two samples per prompt.
        options: a frozen dataclass; every field has a default.
        aggregations: values of actor.loss_agg_mode that match the definition in its paper; empty
            allows any.
        takes_parts: True if it uses rewards of individual turns or tokens.
        preferences: True if it learns from preferred answers, which may be recorded
            (`data.answers=pairs`).
    """

    function: Callable[..., Any]
    reads: tuple[str, ...]
    needs_critic: bool
    compares_samples: bool
    options: type
    aggregations: tuple[str, ...] = ()
    takes_parts: bool = False
    preferences: bool = False


@dataclass(frozen=True)
class Flow:
    """The algorithm of a run; `hybridflow.flows.base` defines its interface.

    Attributes:
        body: the async function that executes the run.
        roles: names of the roles that the function calls, for example "critic".
        options: a frozen dataclass; every field has a default.
        policy_losses: values of actor.policy_loss that match the definition in its paper; empty
            allows any.
        rewards: names of the numbers that the reward function must return in addition to the score.
        name: the name under which it is registered.
        line: line number of the registration in its file.
    """

    body: Callable[[Any], Coroutine[Any, Any, None]]
    roles: tuple[str, ...]
    options: type
    policy_losses: tuple[str, ...]
    rewards: tuple[str, ...]
    name: str
    line: int | None


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss. `hybridflow.algorithms.policy_losses.base` defines the interface of the
    function that computes the loss.

    Attributes:
        reads: per-token columns that it needs.
        options: a frozen dataclass; every field has a default.
        aggregations: values of actor.loss_agg_mode that match the definition in its paper; empty
            allows any.
    """

    function: Callable[..., Any]
    reads: tuple[str, ...]
    options: type
    aggregations: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker; `hybridflow.observe.trackers.base` defines its protocol.

    Attributes:
        make: creates the tracker for a run folder.
        in_driver: True if it runs in the driver, because it only writes local files; otherwise it
            runs in a separate process.
        library: import name of the package that it requires; empty if none.
    """

    make: Callable[[Path], Any]
    in_driver: bool = False
    library: str = ""


@dataclass(frozen=True)
class Preparation:
    """A data preparation: its options, and the function that writes its files.

    Attributes:
        options: frozen dataclass; its fields are the option names, with types, ranges and defaults
            as in `hybridflow.config.schema`.
        write: called with the options, an existing empty folder and `data.prepare.source`; writes
            all files of the task to that folder and returns the number of rows per parquet file.
        source_files: names of the raw files that the task reads from `data.prepare.source`; empty
            if it needs none.
        published: the Hugging Face hub dataset that the task reads
            (`hybridflow.data.prepare.published`); None if it reads none.
    """

    options: type
    write: Callable[[Any, Path, Path | None], dict[str, int]]
    source_files: tuple[str, ...] = ()
    published: PublishedSet | None = None


class PublishedSet(Protocol):
    """The published datasets that a preparation reads. Their availability and fingerprints can be
    queried without reading the data.
    """

    def missing(self, options: Any, source: Path | None) -> Iterable[str]:
        """Yield one line for each dataset whose files are unavailable."""
        ...

    def fingerprint(self, options: Any, source: Path | None) -> dict[str, str]:
        """Return fingerprints keyed by file or dataset."""
        ...


ESTIMATORS: Registry[Estimator] = Registry(
    ESTIMATOR.kind, ESTIMATOR.package, "algorithm.adv_estimator"
)
FLOWS: Registry[Flow] = Registry(FLOW.kind, FLOW.package, "algorithm.flow")
POLICY_LOSSES: Registry[TokenLoss] = Registry(
    POLICY_LOSS.kind, POLICY_LOSS.package, "actor.policy_loss"
)
TRACKERS: Registry[TrackerEntry] = Registry(TRACKER.kind, TRACKER.package, "trainer.loggers")
PREPARATIONS: Registry[Preparation] = Registry(
    PREPARE_TASK.kind, PREPARE_TASK.package, "data.prepare.task"
)


def estimator_options(algorithm: AlgorithmConfig) -> Any:
    """Return the options of `algorithm.adv_estimator`. Raises ConfigError if one is unknown or of
    the wrong type."""
    wanted = ESTIMATORS.get(algorithm.adv_estimator).options
    return _options(
        wanted, algorithm, "algorithm", algorithm.adv_estimator_options, "adv_estimator_options"
    )


def flow_options(algorithm: AlgorithmConfig) -> Any:
    """Return the options of the run's flow. Raises ConfigError if one is unknown or of the wrong
    type."""
    name = algorithm.flow
    wanted = NoOptions if name is None else FLOWS.get(name).options
    given = algorithm.flow_options
    if given and not dataclasses.fields(wanted):
        raise ConfigError(
            f"algorithm.flow_options={given}: algorithm.flow={name} has no options; your own flow "
            "can declare them with @flow(..., options=Options), a dataclass with defaults"
        )
    return build_options(wanted(), given, "algorithm.flow_options")


def policy_loss_options(actor: ActorConfig) -> Any:
    """Return the options of `actor.policy_loss`. Raises ConfigError if one is unknown or of the
    wrong type."""
    wanted = POLICY_LOSSES.get(actor.policy_loss).options
    return _options(wanted, actor, "actor", actor.policy_loss_options, "policy_loss_options")


def _options(wanted: type, section: Any, name: str, given: Mapping[str, Any], key: str) -> Any:
    """Build an entry's options. Options that are also keys of the section (`algorithm.gamma`) are
    read from the section, all others from the mapping.
    """
    fields = [field.name for field in dataclasses.fields(wanted)]
    shared = {field: getattr(section, field) for field in fields if hasattr(section, field)}
    for field in shared.keys() & given.keys():
        raise ConfigError(
            f"{name}.{key}.{field}: set this option with the key {name}.{field} instead"
        )
    return build_options(wanted(**shared), given, f"{name}.{key}")
