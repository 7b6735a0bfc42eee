"""What every role with a Megatron model of its own does at its start: join the world, and say what of the model may
leave the device.

Worker modules load `hybridflow.mcore` where a rank needs it, not when they are imported: the driver imports them to
name their methods, and would spend 3 s on a Megatron that it never uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.config import derived
from hybridflow.config.schema import OffloadConfig, ParallelConfig, RunConfig
from hybridflow.device.platform import Platform
from hybridflow.device.residency import Residency
from hybridflow.dispatch import MeshPosition, WorkerContext
from hybridflow.workers.memory import RoleMemory

if TYPE_CHECKING:
    from hybridflow.mcore.policy import Policy


def mesh_position() -> MeshPosition:
    """Where this rank stands for data-parallel calls."""
    from hybridflow.mcore import parallel

    return MeshPosition(*parallel.data_parallel_position())


def join_world(context: WorkerContext, config: RunConfig, layout: ParallelConfig) -> None:
    """Choose the device and create the process groups of `layout`, unless another role of this process has created
    them.

    Every collective is bounded by `cluster.call_timeout_s`.
    """
    from hybridflow.mcore import parallel

    platform = Platform.detect()
    platform.set_device(context.local_rank)
    if not parallel.is_initialized():
        parallel.initialize(layout, config.seed, platform.collective_backend, config.cluster.call_timeout_s)


def role_memory(config: RunConfig, role: str, model: Policy) -> RoleMemory:
    """The memory of `critic`, `reward_model` or `teacher`: what of `model` leaves the device is said in the role's
    section, `offload`."""
    from hybridflow.mcore.model_parts import model_parts

    platform = Platform.detect()
    offload: OffloadConfig = getattr(config, role).offload
    residency = Residency(model_parts(model), platform, model.settle, role)
    return RoleMemory(residency, platform, offload, derived.layout_section(config, role))
