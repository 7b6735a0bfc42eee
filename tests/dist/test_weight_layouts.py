"""Slices of every family from every trainer layout into real SGLang engines of unlike shapes at
once.

Each family's engines start once, without weights, and take new ones from each layout in turn. The
oracles are transformers on a folder written from the same tensors, and the engine's own checksum
and greedy tokens after it has loaded that folder as a cold start does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness.rounding import FACTOR, larger_epsilon, larger_scale
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum
from tests.models import SYNCED

pytestmark = pytest.mark.slow
LAYOUTS = {
    "TP2.PP2.EP2": {"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2},
    "TP2.PP2": {"ranks": 4, "tensor": 2, "pipeline": 2},
    "TP4.EP2.ETP2": {"ranks": 4, "tensor": 4, "expert": 2, "expert_tensor": 2},
    "PP2.VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "DP2.EP2": {"ranks": 2, "expert": 2},
}
PUBLISHED: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"sliding_window": None},
    "glm4_moe": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
OF_FAMILY["moonlight"] = OF_FAMILY["deepseek_v3"] | {"rope_scaling": None}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OF_FAMILY |= {
    "gpt_oss": {"rope_scaling": _YARN | {"truncate": False}, "swiglu_alpha": 1.5},
    "gemma3_text": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 500.0,
        "query_pre_attn_scalar": 11,
        "sliding_window_pattern": 2,
    },
    "olmo3": {"rope_scaling": _YARN, "rope_theta": 500000.0},
    "ministral3": {
        "rope_parameters": _YARN
        | {
            "original_max_position_embeddings": 16384,
            "rope_theta": 10000.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    # SGLang pads shares to 64 columns on CPUs, and cannot split a fused `gate_up_proj` then
    "glm4": {"intermediate_size": 128},
}
WITHOUT_EXPERT_SIZE = ("gpt_oss",)  # SGLang's loader of unquantised experts puts all on each rank
IN_MAKE_TEST = ("deepseek_v3",)  # `test_weight_sync` has a Qwen3-MoE, the main job another


def marked(names: Iterable[str], standard: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in standard else [pytest.mark.full]) for name in names
    ]


@pytest.fixture(
    scope="module",
    params=marked(SYNCED, IN_MAKE_TEST),
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncWorld]:
    model = published(request.param)
    engines: list[Any] = [1, 2]
    if request.param in IN_MAKE_TEST:  # moonlight, the same family, has engines of all shapes
        engines = [{"tensor": 2, "expert": 2}]
    elif is_sparse(model) and request.param not in WITHOUT_EXPERT_SIZE:
        engines.append({"tensor": 2, "expert": 2})
    built = SyncWorld(model, LAYOUTS["TP2.PP2"], engines, tmp_path_factory.mktemp("layouts"))
    try:
        yield built
    finally:
        built.close()


def published(family: str) -> dict[str, Any]:
    return PUBLISHED | SYNCED[family] | OF_FAMILY.get(family, {})


def is_sparse(model: dict[str, Any]) -> bool:
    return any("experts" in key for key in model)


def test_every_layout_reaches_every_engine(world: SyncWorld) -> None:
    numbers = range(len(world.workers))
    for seed, (name, shape) in enumerate(LAYOUTS.items(), start=1):
        world.cut(
            {
                key: size
                for key, size in shape.items()
                if "expert" not in key or is_sparse(world.model)
            }
        )
        assert "no unused tensors" in world.plan_line
        report = world.sync(world.train(seed))
        assert report.stale == {}, name
        differences = {number: world.difference(number, seed) for number in numbers}
        assert max(differences.values()) <= FACTOR, (name, differences)
    # what the bound must find
    for fault in (larger_epsilon, larger_scale):
        assert world.difference(0, seed, change=fault) > FACTOR, fault.__name__
    for number in numbers:
        client = world.client(number)
        streamed = (weights_checksum(client), world.greedy(number))
        load_weights_from_disk(client, str(world.exported(seed)))
        assert (weights_checksum(client), world.greedy(number)) == streamed, number


@pytest.mark.parametrize(
    "family", marked(sorted(SYNCED.keys() - {"qwen3_moe", "moonlight"}), IN_MAKE_TEST)
)
def test_megatron_ranks_of_a_family_reach_an_engine(tmp_path: Path, family: str) -> None:
    """Two tensor-parallel ranks that have trained a step; `test_weight_sync` has a Qwen3-MoE. The
    oracle of the weights is transformers on the ranks' own export."""
    shape: dict[str, Any] = {"ranks": 2, "tensor": 2, "sequence": True}
    world = SyncWorld(published(family), shape, [1], tmp_path, kind="megatron")
    try:
        assert min(world.senders.command("step", seed=1)) > 0
        world.version += 1
        assert world.sync(world.version).stale == {}
        folder = tmp_path / "export"
        world.senders.command("export", folder=str(folder))
        assert world.difference(0, folder) <= FACTOR
    finally:
        world.close()
