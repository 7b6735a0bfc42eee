"""Row shards of any number of ranks, more ranks than rows included, through the slice plan to
engines; and the config key's limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridflow.config.check_backend import problems
from hybridflow.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.fsdp_layout import fsdp_layout, fsdp_rows, fsdp_tensors, shard_rows
from hybridflow.reshard.layout import Catalog
from hybridflow.saving.ownership import fsdp_owners
from hybridflow.sync.schedule import plan_and_prove
from tests.unit.reshard.reshard_cases import (
    Buffers,
    decoder_of,
    engine_buffers,
    execute,
    random_weights,
)

FSDP = RunConfig(
    model=ModelConfig(hf_config={"model_type": "qwen3"}), actor=ActorConfig(backend="fsdp")
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 80])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 331])
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    """The oracle is torch.chunk, which FSDP2 shards with."""
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    mine = [
        list(range(start, start + count))
        for start, count in (shard_rows(rows, rank, ranks) for rank in range(ranks))
    ]
    assert mine == chunks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 80])
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_engines_get_whole_tensors_from_row_shards(model: str, ranks: int) -> None:
    """TP 2 with its padded vocabulary, and TP 1; 80 ranks are more than a norm has rows."""
    decoder = decoder_of(model)
    catalog = Catalog.of(decoder.tensors())
    weights = random_weights(decoder)
    target = engine_layout(decoder, (EngineShape(tensor=2), EngineShape()), "float32")
    plan, proof = plan_and_prove(catalog, fsdp_layout(decoder, ranks, "float32"), target, 1 << 18)
    held: list[Buffers] = []
    for rank in range(ranks):
        held.append({})
        for local in fsdp_tensors(decoder, rank, ranks):
            [piece] = local.pieces
            first = piece.source_start[0]
            held[-1][local.name] = weights[local.name][first : first + local.shape[0]].copy()
    got = engine_buffers(target, catalog, None)
    expected = engine_buffers(target, catalog, weights)
    execute(plan, held, got)
    for mine, wanted in zip(got, expected, strict=True):
        for name in wanted:
            np.testing.assert_array_equal(mine[name], wanted[name], err_msg=name)
    assert proof.unused == ()


@pytest.mark.parametrize("ranks", [1, 3, 7, 80])
def test_a_rank_has_whole_experts_cut_as_torch_cuts_stacked_ones(ranks: int) -> None:
    tensors = decoder_of("qwen3_moe").tensors()
    experts = len([name for name in tensors if ".layers.0." in name and "experts" in name]) // 3
    chunks = [chunk.tolist() for chunk in torch.arange(experts).chunk(ranks)]
    for rank in range(ranks):
        mine = chunks[rank] if rank < len(chunks) else []
        rows = fsdp_rows(tensors, rank, ranks)
        for expert in range(experts):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
            assert rows[name] == (0, tensors[name][0] if expert in mine else 0)


def test_every_row_has_one_owner_for_the_export() -> None:
    decoder = decoder_of("qwen3")
    owners = fsdp_owners(decoder, 3)
    for name, shape in decoder.tensors().items():
        rows = [
            row
            for owned in owners[name]
            for row in range(
                owned.piece.source_start[0], owned.piece.source_start[0] + owned.piece.shape[0]
            )
        ]
        assert rows == list(range(shape[0]))
        assert [owned.rank for owned in owners[name]] == sorted(
            {owned.rank for owned in owners[name]}
        )


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 0.8681981, 0.55, 0.2318019, 0.1, 0.1]),
    ],
)
def test_the_rate_warms_up_and_decays(style: str, expected: list[float]) -> None:
    """Cosine is held to Megatron's scheduler too, by the contract suite."""
    from hybridflow.fsdp.optimizer import learning_rate

    config = OptimConfig(
        lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_steps=2, lr_decay_steps=6
    )
    assert [learning_rate(config, update) for update in range(1, 8)] == pytest.approx(
        expected, abs=1e-6
    )


# ---- the configuration
# --------------------------------------------------------------------------------------------------


def test_fsdp_takes_a_dense_model_without_other_cuts() -> None:
    assert list(problems(FSDP)) == []
    # Megatron: not our business
    assert list(problems(replace(FSDP, actor=ActorConfig(parallel=ParallelConfig(tensor=2))))) == []


@pytest.mark.parametrize(
    "key", ["tensor", "pipeline", "context", "expert", "virtual_pipeline", "expert_tensor"]
)
def test_fsdp_refuses_every_other_cut(key: str) -> None:
    [line] = problems(replace(FSDP, actor=replace(FSDP.actor, parallel=ParallelConfig(**{key: 2}))))
    assert f"actor.parallel.{key}=2" in line
    assert "actor.backend=fsdp" in line
    assert "or actor.backend=megatron" in line


@pytest.mark.parametrize("key", ["sequence", "overlap_grad_reduce", "overlap_param_gather"])
def test_fsdp_refuses_what_is_megatrons(key: str) -> None:
    [line] = problems(
        replace(FSDP, actor=replace(FSDP.actor, parallel=ParallelConfig(**{key: True})))
    )
    assert (
        f"actor.parallel.{key}=true requires Megatron; with actor.backend=fsdp leave it at false"
        in line
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("recompute", "selective"), ("router_replay", "r3"), ("expert_bias_update_rate", 0.001)),
        *(("router_aux_loss_coef", 0.01), ("router_z_loss_coef", 0.001)),
    ],
)
def test_fsdp_refuses_settings_that_it_would_ignore(key: str, value: object) -> None:
    [line] = problems(replace(FSDP, actor=replace(FSDP.actor, **{key: value})))
    assert f"actor.{key}={value} is not supported with actor.backend=fsdp" in line


def test_fsdp_recomputes_whole_layers() -> None:
    assert list(problems(replace(FSDP, actor=replace(FSDP.actor, recompute="full")))) == []


def test_fsdp_refuses_a_critic_in_its_processes() -> None:
    [line] = problems(replace(FSDP, algorithm=AlgorithmConfig(adv_estimator="gae")))
    assert "set critic.placement=own" in line
