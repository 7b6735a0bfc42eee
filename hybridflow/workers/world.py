"""How a worker's process joins the Megatron world; the roles of one process join once.

Worker modules load `hybridflow.mcore` where a rank needs it, not when they are imported: the driver imports them to name their methods, and
would spend 3 s on a Megatron that it never uses.
"""

from __future__ import annotations

from hybridflow.config.schema import ParallelConfig, RunConfig
from hybridflow.dispatch import MeshPosition, WorkerContext
from hybridflow.platform import Platform


def mesh_position() -> MeshPosition:
    """Where this rank stands for data-parallel calls."""
    from hybridflow.mcore import parallel

    return MeshPosition(*parallel.data_parallel_position())


def join_world(context: WorkerContext, config: RunConfig, layout: ParallelConfig) -> None:
    """Choose the device and create the process groups of `layout`, unless another role of this process has created them.

    Every collective is bounded by `cluster.call_timeout_s`.
    """
    from hybridflow.mcore import parallel

    platform = Platform.detect()
    platform.set_device(context.local_rank)
    if not parallel.is_initialized():
        parallel.initialize(layout, config.seed, platform.collective_backend, config.cluster.call_timeout_s)
