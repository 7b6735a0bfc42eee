"""Maps processes to nodes, devices and ports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridflow.errors import ResourceError
from hybridflow.placement.pools import Group, Packing, Pool
from hybridflow.placement.shape import ClusterShape, Node

# Below the ephemeral range, so that no outgoing connection can take a port before it is bound. This includes the ports
# that SGLang derives by adding 233.
PORTS = range(20000, 32500)
_ORDER: dict[Packing, int] = {"whole_nodes": 0, "pack": 1, "spread": 2}
_SHOWN_NODES = 16
Room = tuple[int, tuple[int, ...]]  # a node index, and some of its devices


@dataclass(frozen=True)
class Process:
    """One process of the map.

    Args:
        role: as in `Group`.
        rank: index of the member within its role: the rank, or the engine index.
        part: index among the member's nodes (an engine's node rank); 0 except for engines over several nodes.
        node: index of the node in `ClusterShape.nodes`.
        devices: the node's devices that the process uses, as positions among the node's free devices.
        visible: the devices that the process sees, in its numbering. A model rank sees those of all ranks of its role
            on the node, where its own device has index `local_rank`; an engine sees only its own.
        local_rank: index among the role's processes on the node.
        ports: range of listening ports that is reserved for this process on its node.
    """

    role: str
    rank: int
    part: int
    node: int
    devices: tuple[int, ...]
    visible: tuple[int, ...]
    local_rank: int
    ports: range


@dataclass(frozen=True)
class Placement:
    """The location of every process of a run."""

    cluster: ClusterShape
    processes: tuple[Process, ...]

    @cached_property
    def _by_role(self) -> dict[str, tuple[Process, ...]]:
        roles = dict.fromkeys(process.role for process in self.processes)
        return {role: tuple(one for one in self.processes if one.role == role) for role in roles}

    def of(self, role: str) -> tuple[Process, ...]:
        """Return the processes of a role, ordered by rank and part."""
        return self._by_role[role]

    def describe(self) -> str:
        """Format the map as text, one line per role and node."""
        lines, here = [f"Placement on {self.cluster.describe()}"], defaultdict[int, dict[str, list[Process]]](dict)
        for process in self.processes:
            here[process.node].setdefault(process.role, []).append(process)
        wide = max(len(process.role) for process in self.processes)
        for number, node in enumerate(self.cluster.nodes):
            lines += [
                f"  {node.address}  {role:<{wide}}  {_members(found)}{_on(found, self.cluster.kind)}"
                for role, found in here[number].items()
            ] or [f"  {node.address}  not used"]
        return "\n".join(lines)


def place(cluster: ClusterShape, pools: Sequence[Pool]) -> Placement:
    """Place every process of `pools` on a node and its devices. Deterministic.

    Pools of fixed shape are placed first, then pools that need whole nodes, then packed pools, then spread pools.

    Raises:
        ResourceError: a pool does not fit in addition to the earlier ones. Names what it needs and what is left on each
            node.
    """
    free = [list(range(node.devices)) for node in cluster.nodes]
    found: list[tuple[Group, int, int, Room]] = []
    for pool in sorted(pools, key=lambda pool: (pool.shape is None, _ORDER[pool.packing])):
        rooms = _rooms(cluster, pool, free)
        for group in pool.groups:
            members = _members_in(rooms, group, "spread", cluster.is_local)
            if members is None:
                raise ResourceError(_does_not_fit(cluster, pool, group, rooms))
            found += [
                (group, rank, part, room) for rank, parts in enumerate(members) for part, room in enumerate(parts)
            ]
        for node, devices in rooms:
            free[node] = [] if pool.packing == "whole_nodes" else [one for one in free[node] if one not in devices]
    return Placement(cluster, tuple(_processes(found)))


def _rooms(cluster: ClusterShape, pool: Pool, free: Sequence[Sequence[int]]) -> list[Room]:
    """Select the pool's devices, by node, from the free ones."""
    allowed = [
        (node, tuple(devices))
        for node, devices in enumerate(free)
        if devices and (pool.packing != "whole_nodes" or len(devices) == _total(cluster.nodes[node]))
    ]
    if pool.shape is not None:
        nodes, each = pool.shape
        fitting = sorted((len(devices), node) for node, devices in allowed if len(devices) >= each)[:nodes]
        if len(fitting) < nodes:
            raise ResourceError(_does_not_fit(cluster, pool, None, allowed))
        return [(node, tuple(free[node][:each])) for _, node in sorted(fitting, key=lambda one: one[1])]
    largest = max(pool.groups, key=lambda group: group.count * group.devices * group.nodes)
    members = _members_in(allowed, largest, pool.packing, cluster.is_local)
    if members is None:
        raise ResourceError(_does_not_fit(cluster, pool, largest, allowed))
    used: dict[int, list[int]] = {}
    for node, devices in sorted(room for parts in members for room in parts):
        used.setdefault(node, []).extend(devices)
    return [(node, tuple(devices)) for node, devices in used.items()]


def _members_in(rooms: Sequence[Room], group: Group, packing: Packing, is_local: bool) -> list[list[Room]] | None:
    """Return the devices of each member's parts, members in node order, or None if they do not fit.

    A member over several nodes is placed on one bundle of nodes. Nodes with the most devices are bundled first, to
    leave few devices unused.
    """
    size, parts = group.devices, 1 if is_local else group.nodes
    stacked = group.nodes // parts  # parts of a member on one node
    order = sorted(rooms, key=lambda room: -len(room[1])) if parts > 1 else list(rooms)
    bundles = [sorted(order[at : at + parts]) for at in range(0, len(order) - parts + 1, parts)]
    capacity = [min(len(devices) for _, devices in bundle) // (size * stacked) for bundle in bundles]
    counts = (_evenly if packing == "spread" else _few)(capacity, group.count)
    if sum(counts) < group.count:
        return None
    members = []
    for bundle, count in sorted(zip(bundles, counts, strict=True)):
        for number in range(count):
            cuts = [(number * stacked + layer) * size for layer in range(stacked)]
            members.append([(node, devices[cut : cut + size]) for node, devices in bundle for cut in cuts])
    return members


def _few(capacity: Sequence[int], count: int) -> list[int]:
    """Distribute `count` over few bins: fill the largest first, and put the rest into the smallest sufficient bin."""
    counts = [0] * len(capacity)
    largest_first = sorted(range(len(capacity)), key=lambda number: (-capacity[number], number))
    for at, number in enumerate(largest_first):
        if capacity[number] >= count:
            last = min(largest_first[at:], key=lambda n: (capacity[n] < count, capacity[n], n))
            counts[last] = count
            break
        counts[number], count = capacity[number], count - capacity[number]
    return counts


def _evenly(capacity: Sequence[int], count: int) -> list[int]:
    """Fill all bins to the same level, up to their capacity. The first bins get the remainder."""
    level, below = 0, 0
    while below < count and (more := sum(one > level for one in capacity)) and below + more <= count:
        level, below = level + 1, below + more
    counts, rest = [min(one, level) for one in capacity], count - below
    for number, one in enumerate(capacity):
        if rest and one > level:
            counts[number], rest = counts[number] + 1, rest - 1
    return counts


def _processes(found: Sequence[tuple[Group, int, int, Room]]) -> Iterable[Process]:
    on_node = Counter(node for _, _, _, (node, _) in found)
    seen: dict[tuple[str, int], tuple[int, ...]] = {}
    for group, _, _, (node, devices) in found:
        seen[group.role, node] = (*seen.get((group.role, node), ()), *devices)
    local_ranks: Counter[tuple[str, int]] = Counter()
    opened: Counter[int] = Counter()
    for group, rank, part, (node, devices) in found:
        share = len(PORTS) // on_node[node]
        first = PORTS.start + opened[node] * share
        visible, local_rank = seen[group.role, node], local_ranks[group.role, node]
        yield Process(
            *(group.role, rank, part, node, devices),
            visible=devices if group.role == "rollout" else visible,
            local_rank=local_rank,
            ports=range(first, first + share),
        )
        local_ranks[group.role, node] += 1
        opened[node] += 1


def _total(node: Node) -> int:
    return node.devices + node.taken


# ---- formatting


def _does_not_fit(cluster: ClusterShape, pool: Pool, group: Group | None, rooms: Sequence[Room]) -> str:
    """Format what a group needs (the pool if `group` is None) and what is left for it on each node."""
    name = group.role if group is not None else pool.name
    if group is None:
        assert pool.shape is not None
        keys = " (cluster.nodes x cluster.procs_per_node)" if pool.name == "actor" else ""
        wanted, on_each = pool.shape
        unit = {"GPUs": "GPU", "processes": "process"}[cluster.unit] if on_each == 1 else cluster.unit
        need = f"{wanted} node{'s' * (wanted > 1)} with {on_each} {unit} each{keys}"
    else:
        members = ("engine" if group.role == "rollout" else "rank") + "s" * (group.count > 1)
        nodes = f" on each of {group.nodes} nodes" if group.nodes > 1 else " on one node"
        each = f", each of {group.devices} {cluster.unit}{nodes}" if group.devices * group.nodes > 1 else ""
        shared = f", on the devices of {pool.name}" if name != pool.name else ""
        need = f"{group.count} {members}{each}{shared}"
    whole = ", on nodes that no other pool uses" if pool.packing == "whole_nodes" else ""
    free = {node: len(devices) for node, devices in rooms}
    there = [f"{node.address}: {free.get(n, 0)} of {_total(node)}" for n, node in enumerate(cluster.nodes)]
    more = [f"{len(there) - _SHOWN_NODES} more nodes"] if len(there) > _SHOWN_NODES else []
    return (
        f"{name} needs {need}{whole}, which the cluster does not have. Left for it ({cluster.unit}): "
        f"{', '.join([*there[:_SHOWN_NODES], *more]) or 'no node'}; give it more nodes, or make {name} smaller"
    )


def _members(found: Sequence[Process]) -> str:
    name = "engine" if found[0].role == "rollout" else "rank"
    ranks, parts = sorted({one.rank for one in found}), sorted({one.part for one in found})
    part = f" (part {_ranges(parts)})" if any(parts) else ""
    return f"{name}{'s' * (len(ranks) > 1)} {_ranges(ranks)}{part}"


def _on(found: Sequence[Process], kind: str) -> str:
    """Format the devices of each process, as a suffix for `describe`."""
    if kind == "cpu":
        return ""
    if all(len(one.devices) == 1 for one in found):
        return f" on GPU {_ranges([one.devices[0] for one in found])}"
    return f" on GPUs {' '.join(_ranges(one.devices) for one in found)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 3, 6 as `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
