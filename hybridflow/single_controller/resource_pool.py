"""Slots for worker processes in Ray placement groups: N nodes x M processes, ranks ordered by node address."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ResourceError
from hybridflow.single_controller.cluster import Cluster, NodeState

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 0.3
_SHOWN = ("CPU", "GPU")


@dataclass(frozen=True)
class Slot:
    """A slot for one process of each colocated group."""

    node: str
    local_rank: int  # position among the slots of its node
    placement_group: Any
    bundle_index: int


@dataclass(frozen=True)
class ResourcePool:
    """An ordered list of slots; rank r of a group runs in slot r.

    Several groups may share a pool and its devices: each process takes 1/`max_colocate` of a slot.
    """

    slots: tuple[Slot, ...]
    gpus: bool
    max_colocate: int

    @classmethod
    def allocate(
        cls,
        cluster: Cluster,
        nodes: int,
        procs_per_node: int,
        *,
        gpus: bool = False,
        max_colocate: int = 4,
        timeout_s: float | None = None,
        detached: bool = False,
    ) -> ResourcePool:
        """Reserve `nodes` x `procs_per_node` slots, all slots of a node together.

        Args:
            cluster: the cluster that has the nodes.
            nodes, procs_per_node: number of nodes, and of slots on each.
            gpus: whether each slot has a GPU.
            max_colocate: how many groups may share the slots.
            timeout_s: seconds to wait for nodes and free resources; None: `cluster.config.start_timeout_s`.
            detached: whether the reservation outlives this driver, for detached groups. `release` ends it.

        Raises:
            ResourceError: the slots are not free in time, or can never be (at once). Says what is free on which node.
        """
        if nodes < 1 or procs_per_node < 1 or max_colocate < 1:
            raise ResourceError(
                f"a pool needs at least one node, process and group, got {nodes} x {procs_per_node}, {max_colocate} "
                "colocated"
            )
        need = {"CPU": float(procs_per_node)} | ({"GPU": float(procs_per_node)} if gpus else {})
        wait = cluster.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait
        while True:
            states = cluster.nodes()
            chosen = [state for state in states if _fits(need, state.free)][:nodes]
            if len(chosen) == nodes:
                groups = _reserve(chosen, procs_per_node, gpus, deadline, detached)
                if groups is not None:
                    return cls(_slots(chosen, groups, procs_per_node), gpus, max_colocate)
            # A local cluster has all its nodes; those of a joined cluster may still be starting.
            hopeless = cluster.is_local and sum(_fits(need, state.total) for state in states) < nodes
            if hopeless or time.monotonic() >= deadline:
                raise ResourceError(_explain(states, nodes, need, None if hopeless else wait))
            time.sleep(_POLL_S)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each slot, in rank order."""
        return tuple(slot.node for slot in self.slots)

    def split(self, sizes: Sequence[int]) -> list[ResourcePool]:
        """Consecutive sub-pools of these sizes, which must add up to all slots."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 1:
            raise ResourceError(f"sub-pools of {list(sizes)} slots do not make up a pool of {len(self)}")
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            ResourcePool(self.slots[end - size : end], self.gpus, self.max_colocate)
            for end, size in zip(ends, sizes, strict=True)
        ]

    @staticmethod
    def merge(pools: Sequence[ResourcePool]) -> ResourcePool:
        """One pool with the slots of all, in order. ResourceError when pools overlap or are of different kinds."""
        slots = [slot for pool in pools for slot in pool.slots]
        keys = {(slot.placement_group.id, slot.bundle_index) for slot in slots}
        if len(keys) != len(slots):
            raise ResourceError("merged pools overlap: a slot would hold two ranks")
        if len({(pool.gpus, pool.max_colocate) for pool in pools}) != 1:
            raise ResourceError("pools to merge must agree on gpus and max_colocate")
        return ResourcePool(tuple(slots), pools[0].gpus, pools[0].max_colocate)

    def release(self) -> None:
        """Give the reservations back, also those of pools that this one was split from or merged with. Kill the groups
        first."""
        from ray.util.placement_group import remove_placement_group

        for group in {slot.placement_group.id: slot.placement_group for slot in self.slots}.values():
            remove_placement_group(group)


def _fits(need: dict[str, float], have: dict[str, float]) -> bool:
    return all(have.get(name, 0.0) >= amount for name, amount in need.items())


def _reserve(
    chosen: Sequence[NodeState], procs: int, gpus: bool, deadline: float, detached: bool
) -> list[PlacementGroup] | None:
    """One placement group for each node, or None when somebody else took the slots; then nothing stays reserved."""
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {})
    groups = [
        placement_group(
            [{**bundle, f"node:{state.address}": 0.001} for _ in range(procs)],
            strategy="STRICT_PACK",
            lifetime="detached" if detached else None,
        )
        for state in chosen
    ]
    patience = max(1.0, min(10.0, deadline - time.monotonic()))
    if all(group.wait(timeout_seconds=patience) for group in groups):
        return groups
    for group in groups:
        remove_placement_group(group)
    return None


def _slots(chosen: Sequence[NodeState], groups: Sequence[PlacementGroup], procs: int) -> tuple[Slot, ...]:
    return tuple(
        Slot(state.address, i, group, i) for state, group in zip(chosen, groups, strict=True) for i in range(procs)
    )


def _explain(states: Sequence[NodeState], nodes: int, need: dict[str, float], waited_s: float | None) -> str:
    want = " and ".join(f"{amount:g} {name}" for name, amount in need.items())
    free = "; ".join(
        f"{state.address}: "
        + ", ".join(f"{state.free.get(n, 0.0):g} of {state.total[n]:g} {n} free" for n in _SHOWN if n in state.total)
        for state in states
    )
    after = f" after waiting {waited_s:.0f} s" if waited_s is not None else ""
    return (
        f"needs {nodes} node(s) with {want} each, which the cluster does not have{after}. There: "
        f"{free or 'no live node'}"
    )
