"""Deadlines of a start follow ranks and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.config.build import to_plain
from hybridflow.config.load import load_config
from hybridflow.config.schema import ClusterConfig, RolloutConfig, RunConfig
from hybridflow.config.schema_megatron import ParallelConfig
from hybridflow.planning.deadlines import StartAllowance

SMALL = {
    **{
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 640,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def deadlines(config: RunConfig, sizes: dict[str, object]) -> tuple[float, float]:
    applied = StartAllowance.of(config, sizes).applied(config)
    return applied.cluster.start_timeout_s, applied.rollout.start_timeout_s


def test_a_small_run_keeps_what_the_keys_say() -> None:
    config = replace(
        RunConfig(),
        cluster=ClusterConfig(start_timeout_s=7),
        rollout=RolloutConfig(start_timeout_s=9),
    )
    assert deadlines(config, SMALL) == (7, 9)
    assert to_plain(StartAllowance.of(config, SMALL).applied(config)) == to_plain(config)


def test_ranks_bytes_and_roles_add_to_them() -> None:
    sizes = {
        **SMALL,
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    }
    base = load_config("grpo-qwen3-32b-4x8")
    ranks, engines = deadlines(base, sizes)
    assert ranks > base.cluster.start_timeout_s and engines > base.rollout.start_timeout_s
    more = replace(base, cluster=replace(base.cluster, nodes=64))
    assert deadlines(more, sizes)[0] == pytest.approx(ranks + 0.5 * 8 * 60)
    assert deadlines(base, {**sizes, "num_hidden_layers": 80})[0] > ranks + 60
    cut = replace(
        base,
        actor=replace(base.actor, parallel=ParallelConfig(tensor=8, pipeline=4, sequence=True)),
    )
    whole = replace(
        base, actor=replace(base.actor, parallel=ParallelConfig(tensor=8, sequence=True))
    )
    # a node reads a quarter of the model
    assert deadlines(cut, sizes)[0] < deadlines(whole, sizes)[0]
    wide = replace(
        base, rollout=replace(base.rollout, tensor=32, nodes_per_engine=4, num_engines=1)
    )
    assert deadlines(wide, sizes)[1] > engines + 200
    fresh = replace(base, model=replace(base.model, path=None))
    assert deadlines(fresh, sizes)[0] == pytest.approx(base.cluster.start_timeout_s + 0.5 * 24)


@pytest.mark.slow
def test_the_largest_recipe_has_minutes_and_not_hours() -> None:
    config = load_config("grpo-kimi-k2-256x8")
    ranks, engines = deadlines(config, dict(config.model.hf_config))
    assert 600 < ranks < 3600 and 400 < engines < 1800
    said = StartAllowance.of(config, config.model.hf_config).describe(config)
    assert f"= {ranks:.0f} s" in said and f"= {engines:.0f} s" in said
