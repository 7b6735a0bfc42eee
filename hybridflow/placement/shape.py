"""The machines available for placing processes."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.device.platform import Kind


@dataclass(frozen=True)
class Node:
    """One machine.

    Args:
        address: address at which other nodes reach it; unique.
        devices: number of free GPUs or, on a CPU cluster, number of processes that the node
            accepts.
        taken: number of additional devices in use by other jobs.
    """

    address: str
    devices: int
    taken: int = 0


@dataclass(frozen=True)
class ClusterShape:
    """The nodes of a cluster in rank order, and their kind of device.

    `is_local`: the cluster is only this machine, on loopback. All parts of a multi-node engine then
    run here.
    """

    nodes: tuple[Node, ...]
    kind: Kind = "cuda"
    is_local: bool = False

    @classmethod
    def uniform(cls, nodes: int, devices: int) -> ClusterShape:
        """Return a cluster of identical GPU nodes for plans, with addresses `node-0`, `node-1` and
        so on."""
        return cls(tuple(Node(f"node-{number}", devices) for number in range(nodes)))

    @property
    def unit(self) -> str:
        """Unit of `Node.devices`."""
        return "GPUs" if self.kind == "cuda" else "processes"

    def describe(self) -> str:
        """Format nodes and devices in one line: `4 nodes x 8 GPUs`, or each node's device count if
        they differ."""
        counts = {node.devices for node in self.nodes}
        if len(counts) == 1:
            return (
                f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)} x {counts.pop()} {self.unit}"
            )
        each = ", ".join(f"{node.address}: {node.devices}" for node in self.nodes)
        return f"{len(self.nodes)} nodes ({self.unit}: {each})" if each else "no nodes"
