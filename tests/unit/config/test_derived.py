"""Numbers that follow from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config import derived
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import load_config
from tests.unit.config.small import small

TP2 = ("cluster.procs_per_node=2", "actor.parallel.tensor=2", "actor.parallel.sequence=true")


@pytest.mark.parametrize(
    ("overrides", "column", "first", "shown"),
    [
        ((), None, False, "computed by the step's only update; no separate pass"),
        (
            ("actor.ppo_epochs=2",),
            "old_log_probs",
            False,
            "computed by the first update for its own rows; no separate pass",
        ),
        (
            ("actor.ppo_mini_batch_size=1",),
            "old_log_probs",
            False,
            "a separate pass over the other 75% of the rows",
        ),
        (
            ("actor.ppo_epochs=2", "algorithm.kl_coef=0.1"),
            "old_log_probs",
            True,
            "from a pass before the updates",
        ),
        (("algorithm.kl_coef=0.1",), "old_log_probs", True, "from a pass before the updates"),
        (("actor.router_replay=r2",), "old_log_probs", True, "from a pass before the updates"),
        (
            ("actor.ppo_epochs=2", "actor.old_log_probs=engine"),
            "rollout_log_probs",
            False,
            "from the engine",
        ),
        (
            ("algorithm.kl_coef=0.1", "actor.old_log_probs=engine"),
            "rollout_log_probs",
            True,
            "; a separate pass computes",
        ),
    ],
)
def test_a_pass_computes_old_log_probs_where_something_reads_them_before_the_first_update(
    overrides: tuple[str, ...], column: str | None, first: bool, shown: str
) -> None:
    config = load_config("e2e", overrides)
    assert (
        derived.old_log_probs_column(config) == column
        and derived.scores_before_update(config) is first
    )
    [line] = [
        line
        for line in explain(config, Origins(frozenset(), {})).splitlines()
        if "old log-probs" in line
    ]
    assert shown in line


def test_derived_numbers_of_the_demo_layout() -> None:
    overrides = [
        "cluster.nodes=2",
        "data.train_batch_size=32",
        "actor.ppo_mini_batch_size=8",
        "actor.ppo_epochs=2",
        "trainer.total_steps=5",
        "actor.kl_loss_coef=0",
    ]
    config = load_config("tiny-moe-grpo", [*overrides, "rollout.n=4"])
    assert derived.world_size(config) == 8
    assert derived.model_parallel_size(config.actor.parallel) == 4
    assert derived.data_parallel_size(config) == 2
    assert derived.expert_tensor_size(config.actor.parallel) == 1
    assert derived.expert_model_parallel_size(config.actor.parallel) == 4
    assert derived.samples_per_step(config) == 128
    assert derived.samples_per_mini_batch(config) == 32
    assert derived.updates_per_step(config) == 8
    assert derived.updates_per_step(config) * (derived.total_steps(config, None) or 0) == 40
    assert not derived.needs_reference(config)
    assert derived.needs_reference(small("algorithm.kl_coef=0.1"))
    assert derived.run_dir(config) == Path("runs/tiny-moe-grpo")


def test_expert_tensor_follows_tensor_only_without_expert_parallelism() -> None:
    assert derived.expert_tensor_size(small(*TP2).actor.parallel) == 2
    assert derived.expert_tensor_size(small(*TP2, "actor.parallel.expert=2").actor.parallel) == 1
    assert (
        derived.expert_tensor_size(small(*TP2, "actor.parallel.expert_tensor=1").actor.parallel)
        == 1
    )


def test_bfloat16_has_a_bound_of_its_own_on_differences_of_log_probs() -> None:
    """Engines' and trainer's differ by 0.01 to 0.05 in the mean there: the bound for fp32 stopped
    the first step."""

    def bound(*overrides: str) -> float | None:
        return derived.logprob_diff_bound(load_config("tiny-moe-grpo", list(overrides)))

    assert bound("model.dtype=float32") == 0.01
    assert bound("model.dtype=bfloat16") == 0.1
    assert bound("model.dtype=bfloat16", "rollout.logprob_diff_bound=0.2") == 0.2
    assert bound("model.dtype=bfloat16", "rollout.logprob_diff_bound=null") is None
