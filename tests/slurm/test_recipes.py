"""Recipes for clusters on a real Slurm: the shipped files, with nothing but sizes overridden, take
two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.slurm.jobs import PATIENT, Jobs, left_behind

pytestmark = pytest.mark.slow
DENSE = {
    **{
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32},
}
MIXTURE = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIZES = (
    *(
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.val_max_prompts=4",
    ),
    *(
        "actor.ppo_mini_batch_size=2",
        "actor.max_tokens_per_micro_batch=1024",
        "trainer.total_steps=2",
    ),
    *(
        "rollout.n=2",
        "rollout.num_engines=1",
        "rollout.tensor=1",
        "rollout.mem_fraction_static=0.1",
    ),
    *("rollout.max_total_tokens=4096", "rollout.max_running_requests=16"),
    *("cluster.procs_per_node=1", "cluster.devices_per_node=null", *PATIENT),
)
ALONE = ("actor.parallel.tensor=1", "actor.parallel.sequence=false")


def submitted(jobs: Jobs, recipe: str, sizes: Mapping[str, Any], *words: str) -> str:
    """The number of a job of a recipe, with the run called after it."""
    prepared = next(
        word for word in jobs.settings if word.startswith("data.prepare.out=")
    ).partition("=")[2]
    files = (
        f"data.train_files=[{prepared}/train.parquet]",
        f"data.val_files=[{prepared}/test.parquet]",
    )
    config = ", ".join(f"{key}: {value}" for key, value in sizes.items())
    return jobs.submit_recipe(
        recipe,
        "data=files",
        *files,
        "model.path=null",
        f"model.tokenizer={prepared}/tokenizer",
        f"model.hf_config={{{config}}}",
        *SIZES,
        *words,
    )


def takes_two_steps(jobs: Jobs, job: str, name: str) -> None:
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert jobs.steps(name) == [1, 2]
    assert left_behind(job) == []


@pytest.mark.full
def test_a_dense_recipe_colocated(jobs: Jobs) -> None:
    name = "grpo-qwen3-8b-1x8"
    takes_two_steps(jobs, submitted(jobs, name, DENSE, *ALONE), name)


@pytest.mark.full
def test_a_mixture_whose_engine_has_a_node_of_its_own(jobs: Jobs) -> None:
    name = "grpo-qwen3-30b-a3b-2x8"
    split = ("rollout.pool=null", "rollout.sleep_while_training=false", "actor.offload={}")
    layout = ("actor.parallel.tensor=1", "actor.parallel.expert=2", "actor.parallel.sequence=false")
    takes_two_steps(jobs, submitted(jobs, name, MIXTURE, *split, *layout), name)


@pytest.mark.full
def test_a_ppo_recipe(jobs: Jobs) -> None:
    name = "ppo-qwen3-8b-1x8"
    takes_two_steps(jobs, submitted(jobs, name, DENSE, *ALONE), name)
