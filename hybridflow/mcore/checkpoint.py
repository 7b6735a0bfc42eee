"""Save and load model, reference, optimizer, schedule and random state, in the format of Megatron's
dist_checkpointing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from hybridflow.errors import CheckpointError
from hybridflow.mcore import bootstrap
from hybridflow.mcore.checkpoint_files import COMMON, write_index
from hybridflow.mcore.optimizer import adam_step, prime_adam_state, set_adam_step
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.mcore.sharded_state import ShardedState
from hybridflow.process.exchange import Exchange, shared_exchange
from hybridflow.saving.manifest import Manifest
from hybridflow.saving.saver import Job, cause_of, checked_manifest, manifest_of
from hybridflow.saving.saver import Saver as _Saver


class Saver(_Saver):
    """Saves of one policy. All ranks create it and call its methods together."""

    def __init__(self, policy: Policy, timeout_s: float = 1800.0) -> None:
        """`timeout_s`: see `saving.saver.Saver`."""
        super().__init__(lambda folder, phase, step, exchange: _job(policy, folder, phase, step, exchange), timeout_s)


def save(policy: Policy, folder: Path, *, phase: str = "", step: int = 0) -> None:
    """`Saver.save`, without a saver. Collective."""
    job = _job(policy, folder, phase, step, shared_exchange())
    job.write(job.state.owned())


def load(policy: Policy, folder: Path) -> None:
    """Restore what was saved, in place, whatever the parallel layout was then. Collective.

    The random state comes back where the number of ranks is the same.

    Raises:
        CheckpointError: the folder is missing, torn, foreign, or of another model; nothing has been loaded then.
    """
    exchange = shared_exchange()
    manifest = checked_manifest(policy, folder, exchange, COMMON)
    _check_adapters(policy, manifest, folder)
    if policy.optimizer is not None:
        prime_adam_state(policy.optimizer.inner)
    state = ShardedState(
        policy, with_random_state=manifest.layout["world"] == dist.get_world_size() and "rng" in manifest.contains
    )
    wanted = {str(number): tensor for number, tensor in enumerate(state.tensors)}
    try:
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    except (
        Exception,
        CheckpointException,
    ) as error:  # dist_checkpointing raises a dozen types; torch's own is no Exception
        raise CheckpointError(f"{folder} could not be loaded: {cause_of(error)}") from error
    if policy.optimizer is not None:
        set_adam_step(policy.optimizer.inner, int(loaded["training"]["adam_step"]))
        policy.optimizer.scheduler.num_steps = 0  # load_state_dict adds to it
        policy.optimizer.scheduler.load_state_dict(loaded["training"]["scheduler"])
    if "rng" in state.contains:
        torch.set_rng_state(state.random_state)


def _job(policy: Policy, folder: Path, phase: str, step: int, exchange: Exchange) -> Job:
    state = ShardedState(policy)
    training: dict[str, Any] = {}
    if policy.optimizer is not None:
        training = {
            "adam_step": adam_step(policy.optimizer.inner),
            "scheduler": policy.optimizer.scheduler.state_dict(),
        }
    manifest = manifest_of(
        policy, state.contains, _layout(policy), phase, step, {"megatron_core": bootstrap.MEGATRON_VERSION}
    )
    manifest = replace(manifest, lora=_facts(policy))
    return Job(
        state, manifest, lambda to, chunks, hf: write_index(to, chunks, hf, {"training": training}), folder, exchange
    )


def _check_adapters(policy: Policy, manifest: Manifest, folder: Path) -> None:
    """CheckpointError, on all ranks alike, where the checkpoint's adapters are not the policy's."""
    theirs, ours = dict(manifest.lora), _facts(policy)
    if theirs != ours:
        there, here = (
            ", ".join(f"{key}={value}" for key, value in facts.items()) or "rank=0" for facts in (theirs, ours)
        )
        raise CheckpointError(
            f"{folder} was not loaded: actor.lora was {there}, and is {here}; set it as it was, or go on from merged "
            f"weights: "
            "`hybridflow checkpoint export` and model.path"
        )


def _facts(policy: Policy) -> dict[str, Any]:
    return policy.adapters.facts() if policy.adapters else {}


def _layout(policy: Policy) -> dict[str, int]:
    at = coordinates()
    sizes = {"tensor": at.tp_size, "pipeline": at.pp_size, "expert": at.ep_size, "expert_tensor": at.etp_size}
    return {"world": dist.get_world_size(), **sizes, "context": policy.config.context}
