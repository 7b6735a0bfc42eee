"""Checks of additional policies (`roles`): their names, features that are not supported with
several policies, and each policy's settings, which are checked like those of a separate run. Part
of `config.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hybridflow.config import derived
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig

# names that are taken by `run.NAME` in a flow, or by a role's folder in a checkpoint
_TAKEN = {
    *ROLES,
    *("policy", "rollout", "rollouts", "run", "state", "options", "steps", "samples", "all"),
    *("advantages", "leave_out", "later", "sync", "record", "is_tracing"),
}


def problems(
    config: RunConfig, job: str, own_problems: Callable[[RunConfig], list[str]]
) -> Iterator[str]:
    """Yield the problems, one line each.

    Args:
        own_problems: returns the problems with one policy's configuration (`derived.policy_view`).
    """
    if not config.roles or job != "train":
        return
    for name in config.roles:
        if not name.isidentifier() or name.startswith("_") or name in _TAKEN:
            yield (
                f"roles.{name}: a flow calls a policy as run.{name}, but this name is reserved or "
                "not a valid Python identifier; choose another one"
            )
            return
    yield from _unsupported(config)
    for name in config.roles:
        yield from _pool(config, name)
        where = f"roles.{name} (its procs are cluster.procs_per_node here): "
        for line in own_problems(derived.policy_view(config, name)):
            yield where + line


def _unsupported(config: RunConfig) -> Iterator[str]:
    name = ", ".join(config.roles)
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} with roles ({name}): only "
            "the first policy can have a critic; choose an estimator without one, for example grpo"
        )
    for key, value in (
        ("trainer.rollouts_from", config.trainer.rollouts_from is not None),
        ("trainer.rollout_only", config.trainer.rollout_only),
        ("data.answers=pairs", config.data.answers == "pairs"),
    ):
        if value:
            yield (
                f"{key} is not supported with roles ({name}): a run with several policies must "
                "generate and train"
            )


def _pool(config: RunConfig, name: str) -> Iterator[str]:
    if config.roles[name].rollout.pool not in (None, "actor"):
        yield (
            f"roles.{name}.rollout.pool={config.roles[name].rollout.pool}: must be null (separate "
            "devices) or actor (the devices of its own ranks)"
        )
