"""Slots for worker processes: the nodes and devices of a placement, reserved in a Ray placement
group. The devices of all pools are reserved at once, in one bundle per node, and their indices are
queried afterwards. Processes do not request GPUs from Ray but get explicit device lists.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.device.platform import Kind
from hybridflow.errors import ResourceError
from hybridflow.placement import ClusterShape, Group, Node, Placement, Pool, place
from hybridflow.single_controller.cluster import Cluster, NodeState

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 0.3
_PATIENCE_S = 10.0  # time for Ray to grant resources that were free a moment ago
_NODE_ID = "ray.io/node-id"
# Ray settings that would make processes see other devices than those on their lists
_REFUSED = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")


@dataclass(frozen=True)
class Slot:
    """A slot for one process. Its list of visible devices is empty on machines without GPUs."""

    node: str
    local_rank: int  # position among the slots of its node
    placement_group: Any
    bundle_index: int
    devices: tuple[str, ...] = ()
    ports: range = range(20000, 32500)


@dataclass(frozen=True)
class ResourcePool:
    """An ordered list of slots; rank r of a group runs in slot r.

    Several groups may share a pool and its devices: each process takes 1/`max_colocate` of a slot's
    CPU.
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
        """Reserve `nodes` x `procs_per_node` slots. Slots on the same node are consecutive.

        Args:
            cluster: the cluster to reserve on.
            nodes, procs_per_node: number of nodes, and of slots per node.
            gpus: True if each slot has a GPU.
            max_colocate: maximum number of groups that share the slots.
            timeout_s: seconds to wait for nodes and free resources; None for
                `cluster.config.start_timeout_s`.
            detached: if True, the reservation outlives this driver and ends with `release`.
                Required for detached groups.

        Raises:
            ResourceError: the slots do not become free in time, or the request can never be met
                (raised immediately). The message lists the free resources of each node.
        """
        if nodes < 1 or procs_per_node < 1 or max_colocate < 1:
            raise ResourceError(
                f"a pool requires at least one node, process and group, got {nodes} x "
                f"{procs_per_node}, {max_colocate} colocated"
            )
        slots = Pool(
            "the pool", (Group("slots", nodes * procs_per_node),), "pack", (nodes, procs_per_node)
        )
        kind: Kind = "cuda" if gpus else "cpu"
        return reserve(
            cluster,
            [slots],
            kind,
            max_colocate=max_colocate,
            timeout_s=timeout_s,
            detached=detached,
        )[1]["slots"]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each slot, in rank order."""
        return tuple(slot.node for slot in self.slots)

    def split(self, sizes: Sequence[int]) -> list[ResourcePool]:
        """Split into consecutive sub-pools. `sizes` must add up to the number of slots."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 1:
            raise ResourceError(
                f"sub-pool sizes {list(sizes)} must add up to the pool's {len(self)} slots"
            )
        pools = []
        start = 0
        for size in sizes:
            slots = self.slots[start : start + size]
            pools.append(ResourcePool(slots, self.gpus, self.max_colocate))
            start += size
        return pools

    @staticmethod
    def merge(pools: Sequence[ResourcePool]) -> ResourcePool:
        """Concatenate the slots of several pools. Raises ResourceError if the pools overlap, or
        differ in `gpus` or `max_colocate`."""
        slots: list[Slot] = []
        for pool in pools:
            slots += pool.slots
        keys = {(slot.placement_group.id, slot.bundle_index, slot.local_rank) for slot in slots}
        if len(keys) != len(slots):
            raise ResourceError("merged pools overlap: a slot would have two ranks")
        if len({(pool.gpus, pool.max_colocate) for pool in pools}) != 1:
            raise ResourceError("merged pools must have the same gpus and max_colocate")
        return ResourcePool(tuple(slots), pools[0].gpus, pools[0].max_colocate)

    def release(self) -> None:
        """Release the reservation. It is shared by all pools that were reserved together with this
        one, split from it or merged with it. Kill their groups first.
        """
        from ray.util.placement_group import remove_placement_group

        groups = {slot.placement_group.id: slot.placement_group for slot in self.slots}
        for group in groups.values():
            remove_placement_group(group)


def reserve(
    cluster: Cluster,
    pools: Sequence[Pool],
    kind: Kind,
    *,
    max_colocate: int = 4,
    timeout_s: float | None = None,
    detached: bool = False,
) -> tuple[Placement, dict[str, ResourcePool]]:
    """Place `pools` on the free resources and reserve them, all or nothing.

    Returns the placement and the slots of each role.

    The arguments are the same as for `ResourcePool.allocate`; `max_colocate` is raised to the
    number of roles on a pool.

    Raises:
        ResourceError: the pools do not fit within the timeout or can never fit (raised
            immediately), a node has fewer GPUs than `cluster.devices_per_node`, or Ray on a node
            has a setting that would put several processes on one device.
    """
    for pool in pools:
        max_colocate = max(max_colocate, len(pool.groups))
    wait = cluster.config.start_timeout_s if timeout_s is None else timeout_s
    deadline = time.monotonic() + wait
    while True:
        states = _usable(cluster, kind)
        try:
            # a local cluster is complete; nodes of a joined one may still be starting
            if cluster.is_local:
                place(_shape(cluster, states, kind, everything=True), pools)
        except ResourceError as error:
            raise ResourceError(f"{error}{_processors(states, kind)}") from None
        try:
            placement = place(_shape(cluster, states, kind), pools)
            group = _reserve(placement, states, deadline, detached)
            if group is not None:
                return placement, _slots(placement, group, max_colocate)
            reason = "Ray did not grant resources that were free a moment before"
        except ResourceError as error:
            reason = str(error)
        if time.monotonic() >= deadline:
            raise ResourceError(f"after waiting {wait:.0f} s: {reason}{_processors(states, kind)}")
        time.sleep(_POLL_S)


def _usable(cluster: Cluster, kind: str) -> list[NodeState]:
    """Return the nodes that processes can run on, in rank order; for cuda, only nodes with GPUs.

    Raises:
        ResourceError: a node has fewer GPUs than `cluster.devices_per_node`.
    """
    states = cluster.nodes()
    if kind == "cpu":
        return states
    states = [state for state in states if state.total.get("GPU", 0)]
    said = cluster.config.devices_per_node
    for state in states:
        if said is not None and state.total["GPU"] < said:
            raise ResourceError(
                f"node {state.address} has {state.total['GPU']:g} GPUs, fewer than "
                f"cluster.devices_per_node={said}; check nvidia-smi and `ray start --num-gpus` on "
                "that node, or lower cluster.devices_per_node"
            )
    return states


def _shape(
    cluster: Cluster, states: Sequence[NodeState], kind: Kind, everything: bool = False
) -> ClusterShape:
    """Return each node's free (or, with `everything`, total) resources."""
    nodes = []
    for state in states:
        total = _processes_on(state.total, kind)
        free = total if everything else _processes_on(state.free, kind)
        nodes.append(Node(state.address, free, total - free))
    return ClusterShape(tuple(nodes), kind, cluster.is_local)


def _processes_on(resources: Mapping[str, float], kind: Kind) -> int:
    """Return how many processes can run on these resources. A process on a GPU also needs a CPU."""
    most = resources.get("CPU", 0)
    return int(min(most, resources.get("GPU", 0)) if kind == "cuda" else most)


def _reserve(
    placement: Placement, states: Sequence[NodeState], deadline: float, detached: bool
) -> PlacementGroup | None:
    """Reserve a bundle on each node in use. If another driver has acquired some of the resources
    meanwhile, nothing is reserved and None is returned.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    gpus = placement.cluster.kind == "cuda"
    bundles = []
    selectors = []
    for node, devices in _used(placement).items():
        count = float(len(devices))
        bundles.append({"CPU": count} | ({"GPU": count} if gpus else {}))
        selectors.append({_NODE_ID: states[node].node_id})
    group = placement_group(
        bundles,
        strategy="PACK",
        lifetime="detached" if detached else None,
        bundle_label_selector=selectors,
    )
    if group.wait(timeout_seconds=max(1.0, min(_PATIENCE_S, deadline - time.monotonic()))):
        return group
    remove_placement_group(group)
    return None


def _used(placement: Placement) -> dict[int, list[int]]:
    """Return the devices in use by any process, keyed by node."""
    found: dict[int, set[int]] = {}
    for process in placement.processes:
        found.setdefault(process.node, set()).update(process.devices)
    return {node: sorted(found[node]) for node in sorted(found)}


def _slots(
    placement: Placement, group: PlacementGroup, max_colocate: int
) -> dict[str, ResourcePool]:
    """Return the slots of each role, including their device names."""
    gpus = placement.cluster.kind == "cuda"
    used = _used(placement)
    bundle_of = {node: index for index, node in enumerate(used)}
    names = _device_names(placement, group, used) if gpus else {}
    slots: dict[str, list[Slot]] = {}
    for one in placement.processes:
        devices = tuple(names[one.node][device] for device in one.visible) if gpus else ()
        address = placement.cluster.nodes[one.node].address
        slots.setdefault(one.role, []).append(
            Slot(address, one.local_rank, group, bundle_of[one.node], devices, one.ports)
        )
    return {role: ResourcePool(tuple(own), gpus, max_colocate) for role, own in slots.items()}


def _device_names(
    placement: Placement, group: PlacementGroup, used: dict[int, list[int]]
) -> dict[int, dict[int, str]]:
    """Map the placement's devices to those reserved by Ray: {node: {device: name in
    CUDA_VISIBLE_DEVICES}}.

    Raises:
        ResourceError: a node has a Ray setting that overrides device lists, or does not reply.
    """
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ask = ray.remote(_reserved_devices)
    answers = []
    for index, devices in enumerate(used.values()):
        there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = ask.options(num_cpus=0, num_gpus=len(devices), scheduling_strategy=there)
        answers.append(options.remote())
    try:
        found = ray.get(answers, timeout=60 + len(answers))
    except ray.exceptions.RayError as error:
        remove_placement_group(group)
        raise ResourceError(
            f"could not query the reserved devices of the nodes: {error}"
        ) from error
    names = {}
    for (node, devices), (reserved, settings) in zip(used.items(), found, strict=True):
        if settings:
            remove_placement_group(group)
            raise ResourceError(
                f"node {placement.cluster.nodes[node].address} runs Ray with "
                f"{', '.join(settings)}, which would put several ranks on one device; unset it in "
                "the environment of `ray start`"
            )
        names[node] = dict(zip(devices, reserved, strict=True))
    return names


def _reserved_devices() -> tuple[list[str], list[str]]:
    """Return the devices that Ray assigned to this task, and the variables of `_REFUSED` that are
    set. Runs on the node."""
    import os

    import ray

    names = list(map(str, ray.get_gpu_ids()))
    settings = [name for name in _REFUSED if os.environ.get(name, "").lower() in ("1", "true")]
    return sorted(
        names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
    ), settings


def _processors(states: Sequence[NodeState], kind: str) -> str:
    """Describe how many CPUs each GPU node has, for error messages. A node may have too few,
    because each GPU process also needs a CPU.
    """
    if kind == "cpu" or all(
        state.total.get("CPU", 0) >= state.total.get("GPU", 0) for state in states
    ):
        return ""
    each = ", ".join(f"{state.address}: {state.total.get('CPU', 0):g} CPUs" for state in states)
    return f" (each GPU process also needs a CPU; available: {each})"
