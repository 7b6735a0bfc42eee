"""Checks of additional policies (`roles`): their names, features that are not supported with
several policies, and each policy's settings, which are checked like those of a separate run. Part
of `config.check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hybridflow.config import derived
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.keys import as_text, value_at
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
    """Yield one line for each problem with an additional policy.

    Args:
        own_problems: returns one line for each problem with a policy's configuration
            (`derived.policy_view`).
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
    for name, own in config.roles.items():
        yield from _pool(config, name)
        if own.base is not None:
            yield from _base(config, name)
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
    further = {f"roles.{one}.actor": own.actor for one, own in config.roles.items()}
    for key, actor in {"actor": config.actor, **further}.items():
        if actor.lora.rank and actor.lora.sync == "adapter":
            yield (
                f"{key}.lora.sync=adapter is not supported with roles ({name}), because one policy "
                f"may copy the weights of another; set {key}.lora.sync=merged"
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


def _base(config: RunConfig, name: str) -> Iterator[str]:
    """Yield the reasons why the adapters of `roles.NAME` cannot share the first policy's
    weights."""
    own = config.roles[name]
    where = f"roles.{name}.base={own.base}"
    for key, lora in (
        ("actor.lora.rank", config.actor.lora),
        (f"roles.{name}.actor.lora.rank", own.actor.lora),
    ):
        if not lora.rank:
            yield (
                f"{where} requires adapters: without them, training would change the weights that "
                f"the policies share; set {key}, for example to 8, or remove roles.{name}.base"
            )
    for key in ("model", "actor.backend", "actor.parallel"):
        for path, given, wanted in _differing(own, config, key):
            yield (
                f"{where}: roles.{name}.{path}={given} differs from {path}={wanted}, but the two "
                f"policies share weights and processes; remove roles.{name}.{path}, or "
                f"roles.{name}.base"
            )
    if config.actor.backend != "megatron":
        yield (
            f"{where} is not supported with actor.backend={config.actor.backend}; set "
            f"actor.backend=megatron, or remove roles.{name}.base"
        )
    if own.procs is not None:
        yield (
            f"{where}: roles.{name}.procs={own.procs} has no effect, because its adapters are on "
            f"the first policy's ranks; remove roles.{name}.procs"
        )
    for key, actor in (("actor", config.actor), (f"roles.{name}.actor", own.actor)):
        if actor.offload.weights:
            yield (
                f"{where} is not supported with {key}.offload.weights=true, because one policy "
                "would offload weights that another one computes with; set it to false"
            )
    if not config.cluster.in_process:
        yield from _engines(config, name)


def _engines(config: RunConfig, name: str) -> Iterator[str]:
    """Yield one line for each problem with the engines of two policies that share weights."""
    where = f"roles.{name}.base={config.roles[name].base}"
    if config.roles[name].rollout.pool is not None:
        yield (
            f"{where}: roles.{name}.rollout.pool={config.roles[name].rollout.pool} must be null, "
            "because its ranks run on the first policy's devices"
        )
    if derived.alternates(config):
        yield (
            f"{where} is not supported with rollout.pool=actor and "
            "rollout.sleep_while_training=true, because the first policy's engines do not release "
            f"their memory when the {name} runs a pass; set rollout.pool=null"
        )


def _differing(own: Any, first: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value of the additional policy, value of the first one) for each key at or under
    `key` whose values differ."""
    ours, theirs = value_at(own, key), value_at(first, key)
    if not dataclasses.is_dataclass(ours):
        if ours != theirs:
            yield key, as_text(ours), as_text(theirs)
        return
    for field in dataclasses.fields(ours):
        yield from _differing(own, first, f"{key}.{field.name}")
