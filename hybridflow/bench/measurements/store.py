"""Measures the transfer of batches through Ray's object store."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.rounds import Side, Timed
from hybridflow.config.schema import ClusterConfig
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup

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
def store(place: Place) -> Yields:
    """round trip of a 16 MiB batch to two ranks through Ray's object store, compared with a copy"""
    column = np.ones((ROWS, TOKENS), np.int64)
    target = np.zeros_like(column)
    batch = DataProto.from_columns({"response_ids": column})
    with cluster_of(place, 2, 500 << 20) as cluster:
        group = group_of(cluster, place, 2, Echo)
        calls = {"store/there and back": lambda: group.run(Echo.echo, batch).fetch()}
        limit = Side("a copy", lambda: np.copyto(target, column))
        yield Timed(calls, limit, amount=column.nbytes / 1e9, unit="GB/s", bound=0.15)
        group.kill()


def cluster_of(place: Place, ranks: int, store_bytes: int) -> Cluster:
    """Start a cluster for groups of at most `ranks` processes."""
    config = ClusterConfig(
        procs_per_node=ranks,
        start_timeout_s=200,
        call_timeout_s=200,
        object_store_bytes=store_bytes,
    )
    return Cluster.start(config, str(place.local), num_cpus=32)


def group_of(
    cluster: Cluster, place: Place, ranks: int, worker: type, *args: Any
) -> WorkerGroup:
    """Start a group of workers `worker(context, *args)`."""
    pool = ResourcePool.allocate(cluster, 1, ranks)
    role = f"{worker.__name__.lower()}{ranks}"
    return WorkerGroup(cluster, pool, worker, role=role, args=args, log_dir=place.local)
