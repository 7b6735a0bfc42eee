"""A Ray cluster of two nodes on this machine with a rank on each, one of which hangs, or is
stopped, on the node that is not the driver's. Runs as a program of its own: `remote_world.py LOGS`,
JSON out."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hybridflow.config.build import build
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.errors import WorkerError
from hybridflow.process.children import is_running

RECIPE = {
    "devices_per_node": 1,
    "nodes": 2,
    "procs_per_node": 1,
    "start_timeout_s": 240,
    "trusted_network": True,
}


class Stub:
    """Waits."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(Dispatch.ONE_TO_ALL)
    def linger_here(self, rank: int, seconds: float) -> int:
        if self.context.rank == rank:
            time.sleep(seconds)
        return self.context.rank


def main(logs: Path) -> dict[str, Any]:
    """What the driver says of a rank that hangs and of one that was stopped, and whether the group
    starts again."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # else Ray takes this machine's address for 127.0.0.1
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray.cluster_utils import Cluster as Nodes

    from hybridflow.placement import pools_of
    from hybridflow.single_controller import Cluster, WorkerGroup, block_on, reserve

    nodes = Nodes()
    for number in (1, 2):
        nodes.add_node(
            num_cpus=8,
            num_gpus=1,
            node_ip_address=f"127.0.0.{number}",
            object_store_memory=80 << 20,
        )
    try:
        config = build(
            {"cluster": {**RECIPE, "address": nodes.address}, "rollout": {"pool": "actor"}}
        )
        with Cluster.start(config.cluster, logs) as cluster:
            _, pools = reserve(cluster, pools_of(config, "train", "cuda"), "cuda")
            group = WorkerGroup(cluster, pools["actor"], Stub, role="actor", log_dir=logs)
            found: dict[str, Any] = {"nodes": [slot.node for slot in pools["actor"].slots]}
            found["hung"] = _error(lambda: group.run(Stub.linger_here, 1, 600.0, timeout=8.0))
            found["stacks"] = "linger_here" in (logs / "actor-rank1.log").read_text()
            block_on(group.restart())
            stopped = group.pids()[1]
            future = group.call(Stub.linger_here, 1, 600.0, timeout=240.0)
            time.sleep(2.0)
            os.kill(stopped, signal.SIGSTOP)
            found["stopped"] = _error(future.result)
            block_on(group.restart())
            found["left"] = is_running(stopped)
            found["again"] = group.run(Stub.linger_here, 0, 0.0)
            group.kill()
            return found
    finally:
        nodes.shutdown()


def _error(call: Any) -> str:
    try:
        call()
    except WorkerError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
