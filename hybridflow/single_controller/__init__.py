"""The controller: a Ray cluster, resource pools and groups of worker processes. The only package that imports ray."""

from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.colocate import colocated
from hybridflow.single_controller.future import Future, waited_seconds, waiting
from hybridflow.single_controller.in_process import InProcessGroup
from hybridflow.single_controller.pending import Call, Pending, first_done
from hybridflow.single_controller.resource_pool import ResourcePool, reserve
from hybridflow.single_controller.stored import keep_in_store
from hybridflow.single_controller.worker_group import WorkerGroup

__all__ = [
    "Call",
    "Cluster",
    "Future",
    "InProcessGroup",
    "Pending",
    "ResourcePool",
    "WorkerGroup",
    "colocated",
    "first_done",
    "keep_in_store",
    "reserve",
    "waited_seconds",
    "waiting",
]
