"""The controller: a Ray cluster, resource pools and groups of worker processes. This is the only
package that imports ray.
"""

from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.event_loop import (
    begin,
    block_on,
    cancel_all,
    computing,
    in_thread,
    interrupter,
    waited_seconds,
)
from hybridflow.single_controller.future import Future
from hybridflow.single_controller.host import colocated
from hybridflow.single_controller.in_process import InProcessGroup
from hybridflow.single_controller.resource_pool import ResourcePool, reserve
from hybridflow.single_controller.stored import keep_in_store
from hybridflow.single_controller.thread_group import Pending, ThreadGroup
from hybridflow.single_controller.worker_group import WorkerGroup

__all__ = [
    "Cluster",
    "Future",
    "InProcessGroup",
    "Pending",
    "ResourcePool",
    "ThreadGroup",
    "WorkerGroup",
    "begin",
    "block_on",
    "cancel_all",
    "colocated",
    "computing",
    "in_thread",
    "interrupter",
    "keep_in_store",
    "reserve",
    "waited_seconds",
]
