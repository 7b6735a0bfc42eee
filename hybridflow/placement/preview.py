"""Preview of a run's placement without an actual cluster."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config.schema import RunConfig
from hybridflow.errors import ResourceError
from hybridflow.placement.place import Placement, place
from hybridflow.placement.pools import Pool, pools_of
from hybridflow.placement.shape import ClusterShape, Node


def preview(config: RunConfig, job: str = "train") -> Placement | None:
    """Place the job on the smallest cluster that fits it.

    The cluster consists of nodes with `cluster.devices_per_node` GPUs, or of this machine if that
    key is not set. Returns None if the placement depends on the cluster to be joined.

    Raises:
        ResourceError: the job does not fit on any number of such nodes.
    """
    devices = config.cluster.devices_per_node
    if devices is not None:
        pools = pools_of(config, job)
        return place(smallest(pools, devices), pools)
    if config.cluster.address is not None:
        return None
    pools = pools_of(config, job, "cpu")
    here = Node("127.0.0.1", sum(map(_devices, pools)))
    return place(ClusterShape((here,), "cpu", is_local=True), pools)


def smallest(pools: Sequence[Pool], devices: int) -> ClusterShape:
    """Return the smallest cluster of nodes with `devices` GPUs each that fits the pools.

    Raises:
        ResourceError: the pools do not fit on any number of such nodes.
    """
    # one node per part of each member is always sufficient
    most = 0
    for pool in pools:
        most += pool.shape[0] if pool.shape else sum(one.count * one.nodes for one in pool.groups)
    place(ClusterShape.uniform(most, devices), pools)
    least = -(-sum(map(_devices, pools)) // devices)
    for nodes in range(least, most):
        if _fits(pools, nodes, devices):
            return ClusterShape.uniform(nodes, devices)
    return ClusterShape.uniform(most, devices)


def _fits(pools: Sequence[Pool], nodes: int, devices: int) -> bool:
    try:
        place(ClusterShape.uniform(nodes, devices), pools)
    except ResourceError:
        return False
    return True


def _devices(pool: Pool) -> int:
    """Return the minimum number of devices for a pool."""
    if pool.shape is not None:
        return pool.shape[0] * pool.shape[1]
    return max(one.count * one.devices * one.nodes for one in pool.groups)
