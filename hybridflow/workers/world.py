"""What every role with a Megatron model of its own does at its start: join the world, and say what of the model may leave the device."""

from __future__ import annotations

from hybridflow.config import derived
from hybridflow.config.schema import OffloadConfig, ParallelConfig, RunConfig
from hybridflow.dispatch import WorkerContext
from hybridflow.mcore import parallel
from hybridflow.mcore.model_parts import model_parts
from hybridflow.mcore.policy import Policy
from hybridflow.platform import Platform
from hybridflow.residency import Residency
from hybridflow.workers.memory import RoleMemory


def join_world(context: WorkerContext, config: RunConfig, layout: ParallelConfig) -> None:
    """Choose the device and create the process groups of `layout`, unless another role of this process has created them.

    Every collective is bounded by `cluster.call_timeout_s`.
    """
    platform = Platform.detect()
    platform.set_device(context.local_rank)
    if not parallel.is_initialized():
        parallel.initialize(layout, config.seed, platform.collective_backend, config.cluster.call_timeout_s)


def role_memory(config: RunConfig, role: str, model: Policy) -> RoleMemory:
    """The memory of `critic`, `reward_model` or `teacher`: what of `model` leaves the device is said in the role's section, `offload`."""
    platform = Platform.detect()
    offload: OffloadConfig = getattr(config, role).offload
    residency = Residency(model_parts(model), platform, model.settle, role)
    return RoleMemory(residency, platform, offload, derived.layout_section(config, role))
