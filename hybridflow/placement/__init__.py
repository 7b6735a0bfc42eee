"""Assignment of processes to nodes and devices, as a pure function of the cluster and the
configured pools.

Runs, plans and tests share this function.
"""

from hybridflow.placement.place import Placement, Process, place
from hybridflow.placement.pools import Group, Pool, policy_pool, pools_of
from hybridflow.placement.preview import preview, smallest
from hybridflow.placement.shape import ClusterShape, Node

__all__ = [
    "ClusterShape",
    "Group",
    "Node",
    "Placement",
    "Pool",
    "Process",
    "place",
    "policy_pool",
    "pools_of",
    "preview",
    "smallest",
]
