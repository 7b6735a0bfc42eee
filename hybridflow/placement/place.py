"""Maps processes to nodes, devices and ports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from hybridflow.errors import ResourceError
from hybridflow.placement.pools import Group, Packing, Pool, is_engine
from hybridflow.placement.shape import ClusterShape, Node

# Below the ephemeral range, so that no outgoing connection can take a port before it is bound. The
# ports that SGLang derives by adding 233 are also below that range.
PORTS = range(20000, 32500)
_ORDER: dict[Packing, int] = {"whole_nodes": 0, "pack": 1, "spread": 2}
_SHOWN_NODES = 16
_SINGULAR = {"GPUs": "GPU", "processes": "process"}
Room = tuple[int, tuple[int, ...]]  # a node index, and some of its devices
Part = tuple[Group, int, int, Room]  # rank and part of a member of the group, and its place


@dataclass(frozen=True)
class Process:
    """One process of a placement.

    Args:
        role: same as in `Group`.
        rank: index of the member within its role: the rank, or the engine index.
        part: index among the member's nodes (an engine's node rank); 0 except for engines that span
            several nodes.
        node: index of the node in `ClusterShape.nodes`.
        devices: devices that the process uses, as indices into the node's free devices.
        visible: devices visible to the process, in the order of their indices in the process. A
            model rank sees the devices of all ranks of its role on the node, its own at index
            `local_rank`. An engine sees only its own devices.
        local_rank: index among the role's processes on the node.
        ports: range of listening ports reserved for this process on its node.
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
    """The location of every process in a run."""

    cluster: ClusterShape
    processes: tuple[Process, ...]

    @cached_property
    def _by_role(self) -> dict[str, list[Process]]:
        by_role: dict[str, list[Process]] = {}
        for process in self.processes:
            by_role.setdefault(process.role, []).append(process)
        return by_role

    def of(self, role: str) -> tuple[Process, ...]:
        """Return the processes of a role, ordered by rank and part."""
        return tuple(self._by_role[role])

    def describe(self) -> str:
        """Format the placement as text, one line per role and node."""
        lines = [f"Placement on {self.cluster.describe()}"]
        wide = max(map(len, self._by_role))
        here: defaultdict[int, dict[str, list[Process]]] = defaultdict(dict)
        for process in self.processes:
            here[process.node].setdefault(process.role, []).append(process)
        for number, node in enumerate(self.cluster.nodes):
            roles = here[number]
            for role, found in roles.items():
                devices = _on(found, self.cluster.kind)
                lines.append(f"  {node.address}  {role:<{wide}}  {_members(found)}{devices}")
            if not roles:
                lines.append(f"  {node.address}  not used")
        return "\n".join(lines)


def place(cluster: ClusterShape, pools: Sequence[Pool]) -> Placement:
    """Assign every process of `pools` to a node and devices. Deterministic.

    Pools of fixed shape are placed first, then pools that need whole nodes, then packed pools, then
    spread pools.

    Raises:
        ResourceError: a pool does not fit on the devices left by the pools placed before it. The
            message lists its requirements and the free devices per node.
    """
    free = [list(range(node.devices)) for node in cluster.nodes]
    found: list[Part] = []
    for pool in sorted(pools, key=lambda pool: (pool.shape is None, _ORDER[pool.packing])):
        rooms = _rooms(cluster, pool, free)
        for group in pool.groups:
            members = _members_in(rooms, group, "spread", cluster.is_local)
            if members is None:
                raise ResourceError(_does_not_fit(cluster, pool, group, rooms))
            for rank, parts in enumerate(members):
                for part, room in enumerate(parts):
                    found.append((group, rank, part, room))
        for node, devices in rooms:
            if pool.packing == "whole_nodes":
                free[node] = []
            else:
                free[node] = sorted(set(free[node]).difference(devices))
    return Placement(cluster, tuple(_processes(found)))


def _rooms(cluster: ClusterShape, pool: Pool, free: Sequence[Sequence[int]]) -> list[Room]:
    """Select the pool's devices on each node from the free devices."""
    allowed: list[Room] = []
    for number, there in enumerate(free):
        is_whole = len(there) == _total(cluster.nodes[number])
        if there and (is_whole or pool.packing != "whole_nodes"):
            allowed.append((number, tuple(there)))
    if pool.shape is not None:
        nodes, each = pool.shape
        fitting = [(number, there[:each]) for number, there in allowed if len(there) >= each]
        if len(fitting) < nodes:
            raise ResourceError(_does_not_fit(cluster, pool, None, allowed))
        fitting.sort(key=lambda room: len(free[room[0]]))
        return sorted(fitting[:nodes])
    largest = max(pool.groups, key=lambda group: group.count * group.devices * group.nodes)
    members = _members_in(allowed, largest, pool.packing, cluster.is_local)
    if members is None:
        raise ResourceError(_does_not_fit(cluster, pool, largest, allowed))
    used: dict[int, tuple[int, ...]] = {}
    for node, devices in sorted(chain.from_iterable(members)):
        used[node] = (*used.get(node, ()), *devices)
    return list(used.items())


def _members_in(
    rooms: Sequence[Room], group: Group, packing: Packing, is_local: bool
) -> list[list[Room]] | None:
    """Return the devices of each member's parts, with members in node order, or None if they do not
    fit.

    A member that spans several nodes is placed on one bundle of nodes. Nodes with the most devices
    are bundled first, to leave few devices unused.
    """
    size = group.devices
    parts = 1 if is_local else group.nodes
    stacked = group.nodes // parts  # parts of a member on one node
    on_node = stacked * size  # devices of a member on one node
    order = list(rooms)
    if parts > 1:
        order.sort(key=lambda room: -len(room[1]))
    bundles: list[list[Room]] = []
    capacity: list[int] = []  # members of each bundle
    for at in range(0, len(order) - parts + 1, parts):
        bundle = sorted(order[at : at + parts])
        bundles.append(bundle)
        capacity.append(min(len(devices) for _, devices in bundle) // on_node)
    distribute = _evenly if packing == "spread" else _few
    counts = distribute(capacity, group.count)
    if sum(counts) < group.count:
        return None
    members = []
    for bundle, count in sorted(zip(bundles, counts, strict=True)):
        for begin in range(0, count * on_node, on_node):
            member: list[Room] = []
            for node, devices in bundle:
                cuts = range(begin, begin + on_node, size)
                member += [(node, devices[cut : cut + size]) for cut in cuts]
            members.append(member)
    return members


def _few(capacity: Sequence[int], count: int) -> list[int]:
    """Distribute `count` over as few bins as possible: fill the largest first, and put the rest
    into the smallest sufficient bin."""
    counts = [0] * len(capacity)
    largest_first = sorted(range(len(capacity)), key=lambda number: -capacity[number])
    for number in largest_first:
        if capacity[number] >= count:
            sufficient = [n for n in largest_first if not counts[n] and capacity[n] >= count]
            last = min(sufficient, key=lambda n: (capacity[n], n))
            counts[last] = count
            break
        counts[number] = capacity[number]
        count -= capacity[number]
    return counts


def _evenly(capacity: Sequence[int], count: int) -> list[int]:
    """Fill all bins to the same level, up to their capacity. The first bins get the remainder."""
    counts = [0] * len(capacity)
    rest = count
    level = 0
    while rest and level < max(capacity, default=0):
        for number, one in enumerate(capacity):
            if rest and one > level:
                counts[number] += 1
                rest -= 1
        level += 1
    return counts


def _processes(found: Sequence[Part]) -> Iterable[Process]:
    on_node: Counter[int] = Counter()
    seen: defaultdict[tuple[str, int], tuple[int, ...]] = defaultdict(tuple)
    for group, _, _, (node, devices) in found:
        on_node[node] += 1
        seen[group.role, node] += devices
    local_ranks: Counter[tuple[str, int]] = Counter()
    opened: Counter[int] = Counter()
    for group, rank, part, (node, devices) in found:
        place = (group.role, node)
        share = len(PORTS) // on_node[node]
        first = PORTS.start + opened[node] * share
        yield Process(
            role=group.role,
            rank=rank,
            part=part,
            node=node,
            devices=devices,
            visible=devices if group.is_engine else seen[place],
            local_rank=local_ranks[place],
            ports=range(first, first + share),
        )
        local_ranks[place] += 1
        opened[node] += 1


def _total(node: Node) -> int:
    return node.devices + node.taken


# ---- formatting


def _does_not_fit(
    cluster: ClusterShape, pool: Pool, group: Group | None, rooms: Sequence[Room]
) -> str:
    """Format the requirements of a group (of the pool if `group` is None) and the free devices per
    node."""
    name = pool.name if group is None else group.role
    need = _shape_of(pool, cluster) if group is None else _members_of(group, pool, cluster)
    whole = ", on nodes that no other pool uses" if pool.packing == "whole_nodes" else ""
    free = dict(rooms)
    there = []
    for number, node in enumerate(cluster.nodes[:_SHOWN_NODES]):
        count = len(free.get(number, ()))
        there.append(f"{node.address}: {count} of {_total(node)}")
    more = len(cluster.nodes) - _SHOWN_NODES
    if more > 0:
        there.append(f"{more} more nodes")
    listed = ", ".join(there) or "no nodes"
    return (
        f"{name} needs {need}{whole}, which does not fit on the cluster. Free {cluster.unit}: "
        f"{listed}; add nodes, or make {name} smaller"
    )


def _shape_of(pool: Pool, cluster: ClusterShape) -> str:
    assert pool.shape is not None
    nodes, each = pool.shape
    unit = _SINGULAR[cluster.unit] if each == 1 else cluster.unit
    keys = " (cluster.nodes x cluster.procs_per_node)" if pool.name == "actor" else ""
    return f"{_counted(nodes, 'node')} with {each} {unit} each{keys}"


def _members_of(group: Group, pool: Pool, cluster: ClusterShape) -> str:
    text = _counted(group.count, "engine" if group.is_engine else "rank")
    if group.devices * group.nodes > 1:
        nodes = f"each of {group.nodes} nodes" if group.nodes > 1 else "one node"
        text += f", each of {group.devices} {cluster.unit} on {nodes}"
    if group.role != pool.name:
        text += f", on the devices of {pool.name}"
    return text


def _counted(count: int, name: str) -> str:
    return f"{count} {name}s" if count > 1 else f"{count} {name}"


def _members(found: Sequence[Process]) -> str:
    name = "engine" if is_engine(found[0].role) else "rank"
    ranks = sorted({one.rank for one in found})
    if len(ranks) > 1:
        name += "s"
    parts = sorted({one.part for one in found})
    part = f" (part {_ranges(parts)})" if any(parts) else ""
    return f"{name} {_ranges(ranks)}{part}"


def _on(found: Sequence[Process], kind: str) -> str:
    """Format the devices of each process, as a suffix for `describe`."""
    if kind == "cpu":
        return ""
    devices = [one.devices for one in found]
    if set(map(len, devices)) == {1}:
        return f" on GPU {_ranges(chain.from_iterable(devices))}"
    return f" on GPUs {' '.join(map(_ranges, devices))}"


def _ranges(numbers: Iterable[int]) -> str:
    """Format 0, 1, 2, 3, 6 as `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{first}-{rest[-1]}" if rest else str(first) for first, *rest in runs)
