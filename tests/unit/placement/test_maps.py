"""Maps of usual clusters, kept as text in `maps/`, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.build import build
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ResourceError
from hybridflow.placement import (
    ClusterShape,
    Group,
    Node,
    Placement,
    Pool,
    place,
    pools_of,
    preview,
)

MAPS = Path(__file__).parent / "maps"
EIGHT = {"address": "auto", "devices_per_node": 8}
# name: nodes, trainer's nodes x ranks, engines
RUNS = {
    "1x8-colocated": (1, (1, 8), {"num_engines": 4, "tensor": 2, "pool": "actor"}),
    "4x8-colocated": (4, (4, 8), {"num_engines": 16, "tensor": 2, "pool": "actor"}),
    "4x8-split-16-16": (4, (4, 4), {"num_engines": 8, "tensor": 2}),
    "8x8-two-train-six-rollout": (
        8,
        (2, 8),
        {"num_engines": 24, "tensor": 2, "packing": "whole_nodes"},
    ),
    "256x8": (
        256,
        (128, 8),
        {"num_engines": 64, "tensor": 16, "nodes_per_engine": 2, "packing": "whole_nodes"},
    ),
}


def run(
    nodes: int, ranks: int, rollout: dict[str, object], **sections: dict[str, object]
) -> RunConfig:
    cluster = {**EIGHT, "nodes": nodes, "procs_per_node": ranks}
    return build({"cluster": cluster, "rollout": rollout, **sections})


@pytest.mark.parametrize("name", RUNS)
def test_the_map_of_a_usual_cluster(name: str) -> None:
    nodes, (trainers, ranks), rollout = RUNS[name]
    config = run(trainers, ranks, rollout)
    found = place(ClusterShape.uniform(nodes, 8), pools_of(config))
    assert found.describe() + "\n" == (MAPS / f"{name}.txt").read_text(encoding="utf-8")
    assert preview(config) == found  # the smallest cluster is this one


def devices(found: Placement, role: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.node, one.devices) for one in found.of(role)]


def test_roles_on_one_pool_use_the_same_devices() -> None:
    own = {"placement": "own", "procs": 2}
    config = run(
        *(1, 4, {"num_engines": 2}),
        algorithm={"adv_estimator": "gae"},
        critic=own,
        teacher={**own, "path": "teacher", "pool": "critic"},
    )
    found = place(ClusterShape.uniform(1, 8), pools_of(config))
    assert devices(found, "critic") == devices(found, "teacher") == [(0, (4,)), (0, (5,))]
    assert devices(found, "rollout") == [(0, (6,)), (0, (7,))]


def test_spread_takes_every_node_and_pack_few() -> None:
    def nodes(packing: str) -> list[int]:
        config = run(1, 2, {"num_engines": 4, "tensor": 2, "packing": packing})
        return [
            one.node for one in place(ClusterShape.uniform(4, 8), pools_of(config)).of("rollout")
        ]

    assert (nodes("pack"), nodes("spread"), nodes("whole_nodes")) == (
        [1] * 4,
        [0, 1, 2, 3],
        [1] * 4,
    )


def test_what_is_left_of_whole_nodes_is_nobodys() -> None:
    pools = [
        Pool("rollout", (Group("rollout", 2, 2),), "whole_nodes"),
        Pool("critic", (Group("critic", 4),)),
    ]
    found = place(ClusterShape.uniform(2, 8), pools)
    assert {one.node for one in found.of("rollout")} == {0}
    assert {one.node for one in found.of("critic")} == {1}
    with pytest.raises(
        ResourceError, match=r"critic needs 4 ranks, which .* node-0: 0 of 8; add nodes"
    ):
        place(ClusterShape.uniform(1, 8), pools)


def test_without_gpus_an_engine_is_a_process_on_this_machine() -> None:
    config = build(
        {
            "cluster": {"procs_per_node": 2},
            "rollout": {"num_engines": 2, "tensor": 4, "nodes_per_engine": 2},
        }
    )
    found = preview(config)
    assert found is not None
    assert [(one.rank, one.part, one.node) for one in found.of("rollout")] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert preview(build({"cluster": {"address": "auto"}})) is None  # only its nodes can tell


@pytest.mark.parametrize(
    ("nodes", "trainers", "rollout", "message"),
    [
        (
            4,
            (5, 8),
            {},
            r"actor needs 5 nodes with 8 GPUs each .* node-3: 8 of 8; add nodes",
        ),
        (4, (4, 9), {}, r"actor needs 4 nodes with 9 GPUs each"),
        (4, (4, 8), {"num_engines": 1}, r"rollout needs 1 engine, which .* node-0: 0 of 8"),
        (
            4,
            (4, 8),
            {"num_engines": 17, "tensor": 2, "pool": "actor"},
            r"rollout needs 17 engines, each of 2 GPUs on one node, on the devices of actor,",
        ),
        (
            4,
            (2, 8),
            {"num_engines": 2, "tensor": 9},
            r"rollout needs 2 engines, each of 9 GPUs on one node, which",
        ),
        (
            3,
            (2, 8),
            {"tensor": 16, "nodes_per_engine": 2},
            r"rollout needs 1 engine, each of 8 GPUs on each of 2 nodes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    nodes: int, trainers: tuple[int, int], rollout: dict[str, object], message: str
) -> None:
    with pytest.raises(ResourceError, match=message):
        place(ClusterShape.uniform(nodes, 8), pools_of(run(*trainers, rollout)))


def test_no_number_of_nodes_helps_an_engine_that_fits_none() -> None:
    with pytest.raises(ResourceError, match="each of 16 GPUs on one node"):
        preview(run(1, 8, {"tensor": 16}))


def test_nodes_that_differ_are_said_each() -> None:
    shape = ClusterShape((Node("10.0.0.1", 8), Node("10.0.0.2", 4)))
    assert shape.describe() == "2 nodes (GPUs: 10.0.0.1: 8, 10.0.0.2: 4)"
    assert ClusterShape(()).describe() == "no nodes"


def test_a_rank_sees_the_devices_of_its_role_and_an_engine_its_own() -> None:
    found = place(ClusterShape.uniform(1, 8), pools_of(run(1, 4, {"num_engines": 2, "tensor": 2})))
    assert [(one.visible[one.local_rank],) for one in found.of("actor")] == [
        one.devices for one in found.of("actor")
    ]
    assert [one.visible for one in found.of("actor")] == [(0, 1, 2, 3)] * 4
    assert [one.visible for one in found.of("rollout")] == [(4, 5), (6, 7)]


def test_a_node_that_somebody_else_uses_is_no_whole_node() -> None:
    shape = ClusterShape((Node("10.0.0.1", 4, taken=4), Node("10.0.0.2", 8)))
    whole = Pool("rollout", (Group("rollout", 1),), "whole_nodes")
    assert place(shape, [whole]).of("rollout")[0].node == 1
    with pytest.raises(ResourceError, match=r"10\.0\.0\.1: 0 of 8, 10\.0\.0\.2: 8 of 8"):
        place(shape, [Pool("rollout", (Group("rollout", 2, 8),), "whole_nodes")])
