"""Which process runs on which node and devices: a pure function of the cluster and of the pools that a configuration
asks for. A run, a plan and a test ask the same function."""

from hybridflow.placement.place import Placement, Process, place
from hybridflow.placement.pools import Group, Pool, pools_of
from hybridflow.placement.preview import preview, smallest
from hybridflow.placement.shape import ClusterShape, Node

__all__ = ["ClusterShape", "Group", "Node", "Placement", "Pool", "Process", "place", "pools_of", "preview", "smallest"]
