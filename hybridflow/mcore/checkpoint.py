"""Saves and loads the model, adapters, reference, optimizer, schedule and random state of a
Megatron policy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.errors import CheckpointError
from hybridflow.mcore import bootstrap
from hybridflow.mcore.optimizer import adam_step, prime_adam_state, set_adam_step
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.mcore.sharded_state import ShardedState
from hybridflow.process.exchange import Exchange, shared_exchange
from hybridflow.saving.manifest import Manifest
from hybridflow.saving.saver import Job, check_adapters, checked_manifest, manifest_of, restore
from hybridflow.saving.saver import Saver as _Saver

_BACKEND = "megatron"


class Saver(_Saver):
    """Saves checkpoints of one policy or value model. Its constructor and methods are
    collectives."""

    def __init__(self, policy: Policy, timeout_s: float = 1800.0) -> None:
        """`timeout_s` is the maximum time that a save waits for the slowest rank, and that the next
        save waits for this one.
        """
        super().__init__(
            lambda folder, phase, step, exchange: _job(policy, folder, phase, step, exchange),
            timeout_s,
        )


def save(policy: Policy, folder: Path, *, phase: str = "", step: int = 0) -> None:
    """Write a checkpoint synchronously, without creating a `Saver`. Collective."""
    job = _job(policy, folder, phase, step, shared_exchange())
    job.write(job.state.owned())


def load(policy: Policy, folder: Path) -> None:
    """Restore a checkpoint in place, regardless of the parallel layout it was saved with.
    Collective.

    The random state is restored only if the number of ranks is the same. The optimizer's settings
    are taken from the configuration, not from the checkpoint; the schedule resumes at the saved
    update.

    Raises:
        CheckpointError: the folder is missing, is incomplete, is not a checkpoint, or belongs to
            another model. Nothing has been loaded in that case.
    """
    exchange = shared_exchange()
    manifest = checked_manifest(policy, folder, exchange, _BACKEND)
    check_adapters(manifest, _facts(policy), folder)
    _check_heads(policy, manifest, folder)
    for inner in policy.inner_optimizers():
        prime_adam_state(inner)
    state = ShardedState(
        policy,
        with_random_state=manifest.layout["world"] == dist.get_world_size()
        and "rng" in manifest.contains,
    )
    restore(folder, state.tensors, exchange)
    state.put_back()
    if policy.optimizer is not None:
        set_adam_step(policy.optimizer.inner, int(manifest.training["updates"]))
        policy.optimizer.scheduler.num_steps = int(manifest.training["scheduled"])
        policy.optimizer.scheduler.step(0)  # sets learning rate and weight decay
    if policy.head_training and policy.optimizer is not None:
        policy.head_training.restore(manifest.training["heads"])
    if "rng" in state.contains:
        torch.set_rng_state(state.random_state)


def _job(policy: Policy, folder: Path, phase: str, step: int, exchange: Exchange) -> Job:
    state = ShardedState(policy)
    training: dict[str, Any] = {}
    if (optimizer := policy.optimizer) is not None:
        # skipped updates (non-finite gradient) advance only the schedule
        training = {
            "updates": adam_step(optimizer.inner),
            "scheduled": optimizer.scheduler.num_steps,
            "settings": asdict(optimizer.config),
        }
        if policy.head_training:
            training["heads"] = policy.head_training.facts()
    manifest = manifest_of(
        policy,
        _BACKEND,
        state.contains,
        _layout(policy),
        phase,
        step,
        training=training,
        lora=_facts(policy),
        versions={"megatron_core": bootstrap.MEGATRON_VERSION},
    )
    return Job(state, manifest, folder, exchange)


def _check_heads(policy: Policy, manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError on all ranks unless checkpoint and policy agree on trained heads."""
    theirs = "heads" in manifest.contains
    if theirs == (policy.heads is not None):
        return
    state = "contains" if theirs else "does not contain"
    raise CheckpointError(
        f"{folder} was not loaded: it {state} trained multi-token-prediction heads, but this run "
        f"has actor.mtp.train={str(not theirs).lower()}; restore the setting, or continue from "
        "exported weights (`hybridflow checkpoint export`, then model.path)"
    )


def _facts(policy: Policy) -> dict[str, Any]:
    return policy.adapters.facts() if policy.adapters else {}


def _layout(policy: Policy) -> dict[str, int]:
    at = coordinates()
    sizes = {
        "tensor": at.tp_size,
        "pipeline": at.pp_size,
        "expert": at.ep_size,
        "expert_tensor": at.etp_size,
    }
    return {"world": dist.get_world_size(), **sizes, "context": policy.config.context}
