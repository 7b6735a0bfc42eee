"""Every recipe for GPU clusters composes, is legal, is planned and fits; a recipe that is wrong is
caught."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig
from hybridflow.planning import recipes
from hybridflow.planning.advice import refused, with_values
from hybridflow.planning.autoplan import auto
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import Assumed, job_of
from hybridflow.planning.plan import make_plan

pytestmark = pytest.mark.slow  # plans of all recipes

ROOT = Path(__file__).resolve().parents[3]


def faults(config: RunConfig) -> Sequence[str]:
    """Why a recipe could not run: refused by the trainer's checks, or planned and does not fit."""
    if found := refused(config):
        return found
    cluster = config.cluster
    machines = read_cluster(None, cluster.nodes, cluster.devices_per_node or 8, cluster.device)
    return make_plan(job_of(config, machines)).problems


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_composes_is_legal_and_fits(name: str) -> None:
    before = time.process_time()
    config, plan = recipes.recipe_plan(name)
    assert refused(config) == []
    assert plan.problems == ()  # memory, host memory, and the place of every process
    assert config.name == name
    assert time.process_time() - before < 2


COVERING = ("grpo-qwen3-8b-1x8", "grpo-moonlight-16b-a3b-1x8", "ppo-qwen2.5-7b-1x8")
ALL = [
    pytest.param(name, marks=[] if name in COVERING else [pytest.mark.full])
    for name in recipes.names()
]


@pytest.mark.parametrize("name", ALL)
def test_no_layout_is_much_faster_and_nothing_is_computed_again_that_fits_without(
    name: str,
) -> None:
    config, plan = recipes.recipe_plan(name)
    machines = plan.job.machines
    change, _ = auto(config, machines, Assumed(), None, False)
    best = make_plan(job_of(with_values(config, change), machines))
    assert plan.seconds <= 1.05 * best.seconds, change
    if config.actor.recompute != "none":
        without = with_values(config, {"actor.recompute": "none"})
        assert not make_plan(job_of(without, machines)).fits


def test_every_model_has_grpo_for_two_sizes_and_four_have_ppo() -> None:
    from hybridflow.models.published import published_names

    grpo = [
        name.removeprefix("grpo-").rpartition("-")[0]
        for name in recipes.names()
        if name.startswith("grpo-")
    ]
    assert set(grpo) == set(published_names())
    assert min(grpo.count(model) for model in grpo) >= 2
    assert (
        len({name.rpartition("-")[0] for name in recipes.names() if name.startswith("ppo-")}) >= 4
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo-qwen3-30b-a3b-4x8", "actor.parallel.expert=12"),  # a layout that does not divide
        ("grpo-qwen3-30b-a3b-4x8", "actor.parallel.pipeline=5"),
        # 59 layers over 15 stages
        ("grpo-deepseek-v3-32x8", "actor.parallel.first_stage_layers=0"),
        ("grpo-deepseek-v3-32x8", "actor.parallel.pipeline=2"),  # 3 and 2 of 61 layers
        ("grpo-qwen3-30b-a3b-4x8", "actor.parallel.expert=1"),  # experts whole on every rank
        ("grpo-llama-3.1-70b-4x8", "actor.parallel.pipeline=1"),
        ("grpo-qwen2.5-32b-2x8", "rollout.tensor=3"),
        ("grpo-qwen3-235b-a22b-16x8", "rollout.tensor=4"),  # weights alone fill the device
        ("grpo-deepseek-v3-32x8", "actor.recompute=none"),
        ("grpo-llama-3.1-405b-28x8", "actor.recompute=selective"),
        ("grpo-qwen2.5-7b-1x8", "actor.ppo_mini_batch_size=48"),  # no divisor of the batch
        ("grpo-qwen2.5-7b-1x8", "data.max_response_length=16384"),  # longer than a micro-batch
        ("grpo-kimi-k2-256x8", "actor.ppo_mini_batch_size=3"),
        ("grpo-mixtral-8x22b-8x8", "actor.max_tokens_per_micro_batch=400000"),
        ("ppo-llama-3.1-70b-4x8", "actor.offload.optimizer=false"),
        ("grpo-qwen3-14b-1x8", "rollout.num_engines=5"),  # more than the devices have room for
    ],
)
def test_a_recipe_that_is_wrong_is_caught(name: str, change: str) -> None:
    assert faults(load_config(name, [change])) != ()


def test_the_document_is_what_the_planner_says() -> None:
    written = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert written.strip() == recipes.document().strip(), (
        "run: hybridflow plan --recipes > docs/recipes.md"
    )
