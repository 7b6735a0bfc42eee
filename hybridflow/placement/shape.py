"""The machines that processes can be placed on."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.device.platform import Kind


@dataclass(frozen=True)
class Node:
    """One machine.

    Args:
        address: where its peers reach it; unique.
        devices: how many GPUs of it are free, or on a CPU cluster how many processes it takes.
        taken: how many more it has, which somebody else uses.
    """

    address: str
    devices: int
    taken: int = 0


@dataclass(frozen=True)
class ClusterShape:
    """The nodes of a cluster in rank order, and the kind of their devices.

    `is_local`: the cluster is this machine alone, on loopback, where an engine over several nodes has all of its parts.
    """

    nodes: tuple[Node, ...]
    kind: Kind = "cuda"
    is_local: bool = False

    @classmethod
    def uniform(cls, nodes: int, devices: int) -> ClusterShape:
        """A cluster of equal GPU nodes, for plans; its addresses are `node-0`, `node-1` and so on."""
        return cls(tuple(Node(f"node-{number}", devices) for number in range(nodes)))

    @property
    def unit(self) -> str:
        """What `Node.devices` counts."""
        return "GPUs" if self.kind == "cuda" else "processes"

    def describe(self) -> str:
        """Nodes and devices in a line: `4 nodes x 8 GPUs`, or each node's count where they differ."""
        counts = {node.devices for node in self.nodes}
        if len(counts) == 1:
            return f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)} x {counts.pop()} {self.unit}"
        each = ", ".join(f"{node.address}: {node.devices}" for node in self.nodes)
        return f"{len(self.nodes)} nodes ({self.unit}: {each})" if each else "no node"
