"""Offload and reload: every byte comes back, the memory really falls, and training does not
notice."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hybridflow.config.schema import ParallelConfig
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.job import cut_of
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Precision, Training
from tests.dist.harness.policies import FULL
from tests.dist.harness.ranks import NOTHING, run_ranks
from tests.models import LARGE, TINY, WITHOUT_VOCABULARY

pytestmark = pytest.mark.slow
ALL = ["gradients", "optimizer", "reference", "weights"]


# name -> processes, layout, dtype, roles: one after another in the same processes, which load
# everything themselves: they are measured
LAYOUTS: dict[str, tuple[int, dict[str, Any], str, tuple[str, ...]]] = {
    "tp2-pp2-ep2": (4, FULL, "float32", ("actor", "critic")),
    "dp2-ep2-bfloat16-sharded-main-parameters": (
        2,
        {"expert": 2},
        "bfloat16",
        ("actor", "reward_model"),
    ),
    "one-process-whole-optimizer": (1, {"distributed_optimizer": False}, "float32", ("actor",)),
}


# the cut in `make test` has a policy and another role
IN_FULL = ("tp2-pp2-ep2", "one-process-whole-optimizer")
of_every_role = pytest.mark.parametrize(
    ("layout", "role"),
    [
        pytest.param(layout, role, marks=[pytest.mark.full] if layout in IN_FULL else [])
        for layout, (*_, roles) in LAYOUTS.items()
        for role in roles
    ],
)


@functools.cache
def of_layout(layout: str) -> list[dict[str, Any]]:
    """What each rank found, by role."""
    world, parallel, dtype, roles = LAYOUTS[layout]
    models = {role: LARGE if role == "actor" else WITHOUT_VOCABULARY for role in roles}
    return run_ranks(
        world,
        "tests.dist.cases.residency:offloaded_roles",
        loaded=NOTHING,
        parallel=parallel,
        models=models,
        dtype=dtype,
    )


@of_every_role
def test_everything_sleeps_and_comes_back_exactly(layout: str, role: str) -> None:
    for rank in (roles[role] for roles in of_layout(layout)):
        held = sum(rank["held"].values())
        left = sum(rank["left"].values())
        assert all(
            size > 4 << 20
            for part, size in rank["held"].items()
            if role == "actor" or part != "reference"
        ), rank["held"]
        assert left < 0.05 * held and rank["freed"] == held - left
        # the process itself, as the kernel counts it
        assert rank["fell"] > 0.95 * held, rank
        assert rank["same"] and rank["moved"] and rank["gradient"] > 1e-3
        without_weights = ["gradients", "optimizer", "reference"]
        assert rank["seen"] == [
            without_weights,
            ["gradients", "reference"],
            ["gradients", "reference"],
            without_weights,
            ALL,
        ]
        assert (
            rank["history"][0] == rank["history"][1] and rank["same_end"] and rank["tensors"] > 50
        )


def test_without_room_nothing_is_lost_and_the_message_says_what_to_change(tmp_path: Any) -> None:
    [rank] = run_ranks(
        1,
        "tests.dist.cases.residency:no_room",
        loaded=NOTHING,
        parallel={},
        hf=TINY,
        folder=str(tmp_path),
    )
    said = rank["said"]
    assert (
        "could not offload" in said["disk"]
        and "still in memory" in said["disk"]
        and "actor.offload.weights=false" in said["disk"]
    )
    assert (
        "out of memory in compute_log_probs: peak " in said["memory"]
        and "weights 0.00 GiB" in said["memory"]
    )
    assert (
        "Reduce actor.max_tokens_per_micro_batch, set actor.offload.optimizer=true, raise "
        "actor.parallel.tensor"
    ) in said["memory"]
    assert (said["goes on"], said["other"]) == ("1", "something else")
    assert (
        rank["peaks"].keys() == {"compute_log_probs", "wrong"}
        and min(rank["peaks"].values()) > 100 << 20
    )
    assert rank["again"] == {}


def test_a_role_that_does_not_train_holds_its_weights_alone(tmp_path: Any) -> None:
    [found] = run_ranks(1, "tests.dist.cases.roles:frozen", folder=str(tmp_path / "reference"))
    assert found["critic"]["gradients"] > 100_000
    for role in ("reference", "teacher"):
        held = found[role]
        assert (
            held["weights"] > 100_000
            and held["gradients"] == held["optimizer"] == held["reference"] == 0
        ), role
    assert found["freed"] > 0.9 * found["reference"]["weights"] and "weights" in found["asleep"]
    assert found["same"] and found["filled"] and found["likeliest"]
    assert found["refused"] == "set_optimizer called on a policy that was built with trains=False"


@of_every_role
def test_a_plan_knows_what_every_role_holds(layout: str, role: str) -> None:
    """Within 20% of the bytes of the rank with most, each part of weights, gradients and optimizer
    state."""
    world, parallel, dtype, _ = LAYOUTS[layout]
    sizes = {
        "vocab_size": LARGE["vocab_size"],
        **(LARGE if role == "actor" else WITHOUT_VOCABULARY),
    }
    cut = cut_of(ParallelConfig(**parallel), world)
    plan = Training(
        decoder_of(sizes), cut, DEVICES["cpu"], Precision.of(dtype), scalar_head=role != "actor"
    )
    held = [rank[role]["held"] for rank in of_layout(layout)]
    for part, planned in (
        ("weights", plan.weights),
        ("gradients", plan.gradients),
        ("optimizer", plan.optimizer),
    ):
        most = max(planned(stage) for stage in range(cut.pipeline))
        assert most == pytest.approx(max(rank[part] for rank in held), rel=0.2), part
