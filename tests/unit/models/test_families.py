"""Each family's map against what transformers saves and what Megatron builds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.config.model_config import with_tower
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.blocks import Experts
from hybridflow.models.layout import Coordinates
from hybridflow.models.published import published, published_names
from hybridflow.models.weights import SafetensorsFolder, initial_weights
from tests.models import FAMILIES, FAMILY_DEEPSEEK, VISIONS
from tests.unit.reshard import reshard_cases as cases

# as their publishers count them, without multi-token-prediction heads
BILLIONS = {
    **{
        "deepseek-v3": 671.0,
        "glm-4.5": 352.8,
        "glm-4.5-air": 106.9,
        "kimi-k2": 1026.4,
        "moonlight-16b-a3b": 16.0,
    },
    **{"llama-3.1-8b": 8.0, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9},
    **{"mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6},
    **{
        "qwen2.5-0.5b": 0.5,
        "qwen2.5-1.5b": 1.5,
        "qwen2.5-3b": 3.1,
        "qwen2.5-7b": 7.6,
        "qwen2.5-14b": 14.8,
    },
    **{"qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7},
    **{
        "qwen3-0.6b": 0.6,
        "qwen3-1.7b": 1.7,
        "qwen3-4b": 4.0,
        "qwen3-8b": 8.2,
        "qwen3-14b": 14.8,
        "qwen3-32b": 32.8,
    },
    **{"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1},
    **{"gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "minimax-m2": 228.7},
    **{"mistral-small-24b": 23.6, "olmo-3-32b": 32.2, "seed-oss-36b": 36.2},
    # without the vision tower, and without the layer for multi-token prediction
    **{"gemma-3-27b": 27.0, "glm-4.7-flash": 29.9},
    **{"qwen3.5-4b": 4.2, "qwen3.5-9b": 9.0, "qwen3.5-27b": 26.9, "qwen3.5-35b-a3b": 34.7},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, written by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {}
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        keys = {key: value for key, value in sizes.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes["model_type"], **keys))
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_those_that_transformers_saves(name: str, saved: dict[str, Path]) -> None:
    from safetensors import safe_open

    family = family_of(json.loads((saved[name] / "config.json").read_text()))
    with safe_open(saved[name] / "model.safetensors", framework="pt") as handle:
        expected = {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118
    assert family.tensors() == expected
    assert (
        family.architecture
        == json.loads((saved[name] / "config.json").read_text())["architectures"][0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_import_and_export_give_the_file_back(
    name: str, layout: str, saved: dict[str, Path]
) -> None:
    decoder = cases.decoder_of(name)
    source = SafetensorsFolder(saved[name])
    ranks = cases.LAYOUTS[layout][0].coordinates()
    weights = {
        key: source.read(key, (0,) * len(shape), shape).numpy()
        for key, shape in decoder.tensors().items()
    }
    held = cases.trainer_buffers(decoder, ranks, weights)
    exported = {
        key: np.full(shape, np.nan, dtype=np.float32) for key, shape in decoder.tensors().items()
    }
    for at, mine in zip(ranks, held, strict=True):
        for local in cases.rank_tensors(decoder, at):
            for piece in local.pieces:
                region = tuple(
                    slice(s, s + n) for s, n in zip(piece.source_start, piece.shape, strict=True)
                )
                exported[piece.source][region] = mine[local.name][piece.slices()]
    for key, value in weights.items():
        np.testing.assert_array_equal(exported[key], value, err_msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_norms_are_those_of_transformers(name: str, saved: dict[str, Path]) -> None:
    """Some families add 1 to the weights of their norms, and start with zeros."""
    family = family_of(json.loads((saved[name] / "config.json").read_text()))
    source = SafetensorsFolder(saved[name])
    initial = initial_weights(family, seed=0)
    norms = [key for key in family.tensors() if "norm" in key]
    assert norms
    for key in norms:
        place = (key, (0,), family.tensors()[key])
        np.testing.assert_array_equal(initial.read(*place), source.read(*place), err_msg=key)


def test_initial_norms_of_a_vision_tower_scale_by_one() -> None:
    family = family_of(with_tower(VISIONS["qwen3_5"]))
    initial = initial_weights(family, seed=0)
    for name in ("blocks.0.norm1", "merger.norm"):
        assert (initial.read(f"model.visual.{name}.weight", (0,), (16,)) == 1).all()
    assert (initial.read("model.language_model.norm.weight", (0,), (32,)) == 0).all()


@pytest.mark.slow
def test_parameters_are_those_that_megatron_builds() -> None:
    script = Path(__file__).with_name("megatron_names.py")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True
    )
    built: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    assert built.keys() == {*FAMILIES, "mtp"}
    for name, shapes in built.items():
        decoder = (
            cases.decoder_of("deepseek_v3", mtp=True) if name == "mtp" else cases.decoder_of(name)
        )
        assert {t.name: list(t.shape) for t in decoder.local_tensors(Coordinates())} == shapes, name


def test_sequential_experts_have_megatrons_other_names() -> None:
    block = Experts(8, 4, 4, grouped=False)
    names = [
        t.name
        for t in block.local(
            "model.layers.0.", "decoder.layers.0.", Coordinates(ep_rank=1, ep_size=2)
        )
    ]
    assert names[2:4] == [
        f"decoder.layers.0.mlp.experts.local_experts.0.linear_fc{i}.weight" for i in (1, 2)
    ]


def test_mtp_heads_stand_on_the_last_stage_beside_a_copy_of_the_embedding() -> None:
    decoder = cases.decoder_of("deepseek_v3", mtp=True)
    last = decoder.local_tensors(Coordinates(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2))
    named = {t.name: t for t in last}
    assert named["mtp.layers.0.eh_proj.weight"].pieces[0].source_start == (32, 0)
    assert named["embedding.word_embeddings.weight"].pieces[0].source == "model.embed_tokens.weight"
    assert named["mtp.layers.0.transformer_layer.mlp.router.expert_bias"].dtype == "float32"
    assert decoder.aliases() == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    assert not decoder.aliases().keys() & decoder.tensors().keys()


def test_megatron_settings_of_deepseek() -> None:
    config = cases.decoder_of("deepseek_v3").megatron_config()
    expected = {
        "multi_latent_attention": True,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "qk_head_dim": 16,
        "rope_type": "rope",
    }
    assert {key: config[key] for key in expected} == expected
    yarn = {
        **FAMILIES["deepseek_v3"],
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0},
        "rope_theta": 50000,
    }
    assert family_of(yarn).megatron_config()["rotary_scaling_factor"] == 40.0
    assert family_of(yarn).megatron_config()["rotary_base"] == 50000.0


def test_settings_of_the_others() -> None:
    assert cases.decoder_of("qwen2").megatron_config()["add_qkv_bias"] is True
    assert cases.decoder_of("glm4_moe").gpt_model_kwargs()["rotary_percent"] == 0.5
    plain = {**FAMILIES["llama"], "rope_parameters": {"rope_theta": 500000.5}}
    assert family_of(plain).gpt_model_kwargs() == {
        "position_embedding_type": "rope",
        "rotary_base": 500000.5,
        "share_embeddings_and_output_weights": False,
        "max_sequence_length": 128,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported; supported: deepseek_v3, ernie4_5, ernie4_5_moe, ",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' without factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic', which is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope', which is not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "separate rotary settings for each kind of layer",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
            "sliding_window is not set or is disabled",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"] * 3},
            r"per layer \(num_hidden_layers=4\)",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "llama_4_scaling_beta",
        ),
        (
            {
                "model_type": "mixtral",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "router_jitter_noise": 0.5,
            },
            "router_jitter_noise",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["sliding_attention"] * 4},
            "must have one entry, linear_attention or full_attention",
        ),
        (
            {"model_type": "qwen3_5_text", "full_attention_interval": 0},
            "full_attention_interval=0",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_num_value_heads": 24},
            "linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16",
        ),
    ],
)
def test_what_has_no_map_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        family_of({**FAMILIES["llama"], **change})
    with pytest.raises(ModelError, match="norm_topk_prob"):
        family_of(
            {**FAMILY_DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False}
        ).megatron_config()


@pytest.mark.slow
def test_the_size_of_qwen3_next_is_the_published_one() -> None:
    """80 billion parameters, 79 without the embedding and the output layer."""
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    shapes = family_of({"model_type": "qwen3_next", **sizes, **heads}).tensors()
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    assert round(total / 1e9, 1) == 79.7
    assert round((total - 2 * 151936 * 2048) / 1e9) == 79


@pytest.mark.slow
@pytest.mark.parametrize("name", published_names())
def test_published_sizes_have_the_published_number_of_parameters(name: str) -> None:
    shapes = family_of(published(name)).tensors().values()
    assert round(sum(int(np.prod(shape)) for shape in shapes) / 1e9, 1) == BILLIONS[name]
    with pytest.raises(ModelError, match="kimi-k2"):
        published("kimi-k3")
