"""How a worker's process joins the Megatron world; the roles of one process join once."""

from __future__ import annotations

from hybridflow.config.schema import ParallelConfig, RunConfig
from hybridflow.dispatch import WorkerContext
from hybridflow.mcore import parallel
from hybridflow.platform import Platform


def join_world(context: WorkerContext, config: RunConfig, layout: ParallelConfig) -> None:
    """Choose the device and create the process groups of `layout`, unless another role of this process has created them.

    Every collective is bounded by `cluster.call_timeout_s`.
    """
    platform = Platform.detect()
    platform.set_device(context.local_rank)
    if not parallel.is_initialized():
        parallel.initialize(layout, config.seed, platform.collective_backend, config.cluster.call_timeout_s)
