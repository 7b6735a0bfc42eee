"""Measures the transfer of batches through Ray's object store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.rounds import Side, Timed
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register

ROWS = 64
TOKENS = 32_768


class Echo:
    """A worker that returns its argument. Every rank is a data-parallel rank."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self) -> MeshPosition:
        """Return this rank's mesh position. Its data-parallel rank equals its rank."""
        return MeshPosition(self.context.rank, self.context.world_size, True)

    @register(Dispatch.DP, writes=("response_ids",))
    def echo(self, batch: DataProto) -> DataProto:
        """Return the batch."""
        return batch


@measurement("store", "micro", timeout_s=120, warm_up=10)
def store(place: Place) -> Iterator[Timed]:
    """round trip of a 16 MiB batch to two ranks through Ray's object store, compared with a copy"""
    from hybridflow.config.schema import ClusterConfig
    from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup

    column = np.ones((ROWS, TOKENS), np.int64)
    target = np.zeros_like(column)
    batch = DataProto.from_columns({"response_ids": column})
    config = ClusterConfig(
        procs_per_node=2,
        start_timeout_s=60,
        call_timeout_s=60,
        object_store_bytes=500 << 20,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster.start(config, folder, num_cpus=8) as cluster,
    ):
        pool = ResourcePool.allocate(cluster, 1, 2)
        group = WorkerGroup(cluster, pool, Echo, role="echo", log_dir=place.local)
        calls = {"store/there and back": lambda: group.run(Echo.echo, batch).fetch()}
        limit = Side("a copy", lambda: np.copyto(target, column))
        yield Timed(calls, limit, amount=column.nbytes / 1e9, unit="GB/s", bound=0.15)
        group.kill()
