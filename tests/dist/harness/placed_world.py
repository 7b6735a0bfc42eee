"""A Ray cluster of several nodes on this machine with GPUs that are not there, and a run's
processes in it with a stub in place of the model. Runs as a program of its own: `placed_world.py
CPU_HEAD RECIPE LOGS`, JSON in and out."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from hybridflow.config.build import build
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.placement import Process

NODES = 4
GPUS = 8


class Stub:
    """Reports where it is, and listens at the address that its peers are given."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.socket = socket.create_server((context.node, 0))

    @register(Dispatch.ONE_TO_ALL)
    def report(self) -> dict[str, Any]:
        import ray

        names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "HYBRIDFLOW_PLATFORM", "GLOO_SOCKET_IFNAME")
        found: dict[str, Any] = {name: os.environ.get(name) for name in names}
        ports = self.context.ports
        return found | {
            "runs on": ray.get_runtime_context().get_node_id(),
            "node": self.context.node,
            "ports": [ports.start, ports.stop],
            "listens": list(self.socket.getsockname()),
        }

    @register(Dispatch.ONE_TO_ALL)
    def reaches(self, peers: list[tuple[str, int]]) -> bool:
        for peer in peers:
            socket.create_connection(peer, timeout=5).close()
        return True


def expected(one: Process, node_ids: list[str]) -> dict[str, Any]:
    """What the map says that a process reports."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, one.visible)),
        "LOCAL_RANK": str(one.local_rank),
        "HYBRIDFLOW_PLATFORM": "cuda",
        "GLOO_SOCKET_IFNAME": "lo",
        "runs on": node_ids[one.node],
        "ports": [one.ports.start, one.ports.stop],
    }


def main(cpu_head: bool, recipe: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Start the nodes and the processes; returns the number of processes and where they differ from
    the map."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # else Ray takes this machine's address for 127.0.0.1
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray.cluster_utils import Cluster as Nodes

    from hybridflow.single_controller import Cluster, WorkerGroup, reserve

    sizes = [0] * cpu_head + [GPUS] * NODES
    nodes = Nodes()
    for number, gpus in enumerate(sizes):
        address = f"127.0.0.{number + 1}"
        nodes.add_node(
            num_cpus=32, num_gpus=gpus, node_ip_address=address, object_store_memory=80 << 20
        )
    try:
        config = build(recipe | {"cluster": {**recipe["cluster"], "address": nodes.address}})
        with Cluster.start(config.cluster, logs) as cluster:
            from hybridflow.placement import pools_of

            kind = cluster.device_kind()
            placement, pools = reserve(cluster, pools_of(config, "train", kind), kind)
            print(placement.describe(), file=sys.stderr)
            ids = {state.address: state.node_id for state in cluster.nodes()}
            node_ids = [ids[node.address] for node in placement.cluster.nodes]
            groups = {
                role: WorkerGroup(cluster, pool, Stub, role=role, log_dir=logs)
                for role, pool in pools.items()
            }
            wrong = []
            listening = []
            count = 0
            for role, group in groups.items():
                for process, said in zip(placement.of(role), group.run(Stub.report), strict=True):
                    count = count + 1
                    wanted = expected(process, node_ids)
                    listening.append(tuple(said["listens"]))
                    if {name: said[name] for name in wanted} != wanted:
                        wrong.append(
                            {"process": f"{role} {process.rank}", "wanted": wanted, "said": said}
                        )
            reached = all(all(group.run(Stub.reaches, listening)) for group in groups.values())
            for group in groups.values():
                group.kill()
            return {
                "kind": kind,
                "processes": count,
                "wrong": wrong,
                "reached": reached,
                "nodes": len(sizes),
            }
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] == "cpu", json.loads(sys.argv[2]), Path(sys.argv[3]))))
