"""What holds of every map, over random clusters and pools."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ResourceError
from hybridflow.placement import ClusterShape, Group, Node, Placement, Pool, place, smallest

SIZES = st.integers(1, 4)
PACKINGS = st.sampled_from(["pack", "spread", "whole_nodes"])


@st.composite
def pools(draw: st.DrawFn) -> list[Pool]:
    """The trainer's pool, maybe with engines in it, and up to three of other roles."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    engines = Group("rollout", draw(SIZES), draw(SIZES), draw(st.integers(1, 2)))
    colocated = draw(st.booleans())
    found = [
        Pool(
            "actor", (Group("actor", shape[0] * shape[1]), *([engines] * colocated)), "pack", shape
        )
    ]
    found += [] if colocated else [Pool("rollout", (engines,), draw(PACKINGS))]
    names = draw(st.lists(st.sampled_from(["critic", "reference", "teacher"]), unique=True))
    return found + [Pool(name, (Group(name, draw(SIZES)),), draw(PACKINGS)) for name in names]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterShape:
    counts = draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    return ClusterShape(
        tuple(Node(f"10.0.0.{number}", count) for number, count in enumerate(counts))
    )


def check(found: Placement, wanted: list[Pool]) -> None:
    pool_of = {group.role: pool for pool in wanted for group in pool.groups}
    groups = {group.role: group for pool in wanted for group in pool.groups}
    # every member of every role once, its parts on different nodes, each whole within its node
    for role, group in groups.items():
        members = Counter(one.rank for one in found.of(role))
        assert members == dict.fromkeys(range(group.count), group.nodes)
        for rank in members:
            parts = [one for one in found.of(role) if one.rank == rank]
            assert [one.part for one in parts] == list(range(group.nodes))
            assert len({one.node for one in parts}) == group.nodes
        order = [one.node for one in found.of(role) if one.part == 0]
        assert group.nodes > 1 or order == sorted(order)
    used: dict[tuple[int, int], set[str]] = {}
    for one in found.processes:
        assert len(one.devices) == groups[one.role].devices
        assert one.devices == tuple(range(one.devices[0], one.devices[0] + len(one.devices)))
        assert one.devices[0] >= 0 and one.devices[-1] < found.cluster.nodes[one.node].devices
        for device in one.devices:
            sharing = used.setdefault((one.node, device), set())
            assert one.role not in sharing  # no two members of a role
            # nobody of another pool
            assert all(pool_of[role] == pool_of[one.role] for role in sharing)
            sharing.add(one.role)
    for node in range(len(found.cluster.nodes)):
        here = [one for one in found.processes if one.node == node]
        names = {pool_of[one.role].name for one in here}
        assert len(names) <= 1 or all(pool_of[one.role].packing != "whole_nodes" for one in here)
        for role in groups:
            assert [one.local_rank for one in here if one.role == role] == list(
                range(sum(r.role == role for r in here))
            )
        ports = [port for one in here for port in (one.ports.start, one.ports.stop - 1)]
        assert len(set(ports)) == len(ports) and ports == sorted(ports)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(clusters(), pools())
def test_every_map_is_sound(cluster: ClusterShape, wanted: list[Pool]) -> None:
    try:
        found = place(cluster, wanted)
    except ResourceError as error:
        assert "which does not fit on the cluster" in str(error)
        return
    check(found, wanted)
    assert place(cluster, wanted) == found


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(pools())
def test_enough_nodes_hold_everything_and_one_less_does_not(wanted: list[Pool]) -> None:
    wanted = [pool for pool in wanted if "rollout" not in [group.role for group in pool.groups[1:]]]
    shape = smallest(wanted, 8)
    check(place(shape, wanted), wanted)
    for nodes in range(1, len(shape.nodes)):
        try:
            place(ClusterShape.uniform(nodes, 8), wanted)
        except ResourceError:
            continue
        raise AssertionError(f"{nodes} nodes are enough, not {len(shape.nodes)}")


@settings(max_examples=100, deadline=None)
@given(clusters(), SIZES, SIZES)
def test_one_pool_is_refused_only_when_it_cannot_fit(
    cluster: ClusterShape, count: int, devices: int
) -> None:
    room = sum(node.devices // devices for node in cluster.nodes)
    try:
        place(cluster, [Pool("rollout", (Group("rollout", count, devices),))])
    except ResourceError:
        assert room < count
    else:
        assert room >= count
