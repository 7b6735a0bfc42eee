"""Save and load model, reference, optimizer, schedule and random state with Megatron's dist_checkpointing.

A checkpoint is written beside its final name and renamed when whole, so a kill or a full disk at any moment leaves the previous one
loadable.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from hybridflow.errors import CheckpointError
from hybridflow.mcore import checkpoint_writer
from hybridflow.mcore.optimizer import prime_adam_state, separate_adam_steps
from hybridflow.mcore.policy import Policy


def save(policy: Policy, folder: Path) -> None:
    """Write the policy's state to `folder`, which must not exist. Collective.

    Raises:
        CheckpointError: when any rank could not write; nothing is left behind.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    checkpoint_writer.install()
    try:
        dist_checkpointing.save(_state(policy, is_loading=False), str(partial))
    except CheckpointException as error:
        causes: list[str] = [""] * dist.get_world_size()  # raised on every rank, but the coordinator alone knows why
        dist.all_gather_object(causes, _cause(error))
        raise _not_written(folder, partial, "; ".join(cause for cause in causes if cause)) from error
    except Exception as error:
        # On this rank alone (rank 0 writes what is common). The others wait in a collective until the controller, told by us, ends them.
        raise _not_written(folder, partial, _cause(error)) from error
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(partial, folder)
    dist.barrier()


def load(policy: Policy, folder: Path) -> None:
    """Restore what `save` wrote into a policy of the same family, in place. Collective.

    Raises:
        CheckpointError: the folder is missing, torn, or of another model.
    """
    if not (folder / "metadata.json").exists():
        raise CheckpointError(f"{folder} is not a whole checkpoint (no metadata.json in it)")
    if policy.optimizer is not None:
        prime_adam_state(policy.optimizer.inner)
    try:
        loaded = dist_checkpointing.load(_state(policy, is_loading=True), str(folder))
    except (Exception, CheckpointException) as error:  # dist_checkpointing raises a dozen types; the user needs the folder and the cause
        raise CheckpointError(f"{folder} could not be loaded: {_cause(error)}") from error
    policy.stage.load_state_dict(loaded["model"], strict=True)
    if "reference" in loaded:
        for name, tensor in loaded["reference"].items():
            policy.reference_state()[name].copy_(tensor)
    if policy.optimizer is not None:
        policy.optimizer.inner.load_state_dict(loaded["optimizer"])
        separate_adam_steps(policy.optimizer.inner)
        policy.optimizer.scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng_state"].reshape(-1))


def _not_written(folder: Path, partial: Path, cause: str) -> CheckpointError:
    """Remove what there is of it; the error to raise."""
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return CheckpointError(
        f"the checkpoint {folder} could not be written ({cause or 'another rank failed'}); the previous checkpoint is untouched. "
        "Free disk space and run the same command again to resume."
    )


def _cause(error: BaseException) -> str:
    """What went wrong; of torch's CheckpointException the ranks' own exceptions (none but on the coordinator), without tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values()))
    return f"{type(error).__name__}: {error}"


def _state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    groups = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # the default sharding type is broken without TE; dp_reshardable could not change the tensor-parallel size
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "dp_cp_group": groups}
    state: dict[str, Any] = {"model": policy.stage.sharded_state_dict(metadata=metadata)}
    if policy.optimizer is not None:
        optimizer = policy.optimizer
        state["optimizer"] = optimizer.inner.sharded_state_dict({"model": state["model"]}, is_loading=is_loading, metadata=metadata)
        state["scheduler"] = optimizer.scheduler.state_dict()
    if policy.has_reference:
        state["reference"] = _reference_state(policy, metadata)
    state["rng_state"] = ShardedTensor.from_rank_offsets(
        "rng_state", torch.get_rng_state(), (0, dist.get_rank(), dist.get_world_size()), prepend_axis_num=1
    )
    return state


def _reference_state(policy: Policy, metadata: dict[str, Any]) -> dict[str, Any]:
    """The same layout as the model's, under keys of its own, over the reference's tensors."""
    sharded = policy.stage.sharded_state_dict(prefix="reference.", metadata=metadata)
    reference, chosen = policy.reference_state(), {}
    for key, entry in sharded.items():
        name = key.removeprefix("reference.")
        if name in reference:
            entry.data = reference[name]
            chosen[name] = entry
    return chosen
