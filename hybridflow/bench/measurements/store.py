"""Ray's object store, as batches go through it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import Place, interleaved, measurement, rates
from hybridflow.bench.result import Metric, Reference
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register

ROWS, TOKENS = 64, 32_768


class Echo:
    """A worker that returns what it is given; every rank is a data-parallel rank."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self) -> MeshPosition:
        """The data-parallel rank is the rank."""
        return MeshPosition(self.context.rank, self.context.world_size, True)

    @register(Dispatch.DP, writes=("response_ids",))
    def echo(self, batch: DataProto) -> DataProto:
        """The batch."""
        return batch


@measurement("store", "micro", timeout_s=120)
def store(place: Place) -> Iterator[Metric]:
    """a batch of 16 MiB to two ranks through Ray's object store and back, fetched, beside a copy"""
    from hybridflow.config.schema import ClusterConfig
    from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup

    column = np.ones((ROWS, TOKENS), np.int64)
    target, batch = np.zeros_like(column), DataProto.from_columns({"response_ids": column})

    def copies() -> None:
        for _ in range(4):
            np.copyto(target, column)

    config = ClusterConfig(procs_per_node=2, start_timeout_s=60, call_timeout_s=60, object_store_bytes=500 << 20)
    with tempfile.TemporaryDirectory() as folder, Cluster.start(config, folder, num_cpus=8) as cluster:
        group = WorkerGroup(cluster, ResourcePool.allocate(cluster, 1, 2), Echo, role="echo", log_dir=place.local)
        found = interleaved(
            {
                "store": lambda: group.run(Echo.echo, batch).fetch(),
                "copy": copies,
            },
            warm_up=10,
        )
        group.kill()
    size = column.nbytes / 1e9
    limit = Reference("a copy", rates(4 * size, found["copy"]))
    yield Metric("store", "store/there and back", "GB/s", "higher", rates(size, found["store"]), limit, bound=0.15)
