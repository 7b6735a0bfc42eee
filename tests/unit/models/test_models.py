"""The Qwen3 map between Hugging Face and Megatron: every rank's parameter is filled, every element
has its place."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.layout import Coordinates, padded_vocab_size
from tests.models import MAP_DENSE, MAP_MODELS, MAP_MOE
from tests.unit.models.map_cases import LAYOUTS, coordinates, hf_weights, local_weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MAP_MODELS)
def test_each_rank_is_filled_and_all_ranks_together_hold_everything(
    model: str, layout: tuple[int, int, int, int]
) -> None:
    family = family_of(MAP_MODELS[model])
    hf = hf_weights(family)
    held = set()
    for at in coordinates(*layout):
        for name, values in local_weights(family, at, hf).items():
            padding = int((values == 0).sum())
            if "word_embeddings" in name or name == "output_layer.weight":
                assert padding <= (padded_vocab_size(51, at.tp_size) - 51) * 16
                assert values.shape == (padded_vocab_size(51, at.tp_size) // at.tp_size, 16)
            else:
                assert padding == 0, f"{name} has elements that nothing fills"
            assert len(np.unique(values[values > 0])) == (values > 0).sum(), (
                f"{name} holds an element twice"
            )
            held |= set(values[values > 0].tolist())
    assert len(held) == sum(prod(shape) for shape in family.tensors().values())


def test_attention_is_interleaved_by_group_and_gate_stands_over_up() -> None:
    family = family_of(MAP_MOE)
    hf = hf_weights(family)
    local = local_weights(
        family, Coordinates(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, ep_rank=1, ep_size=2), hf
    )
    q, k, v = (hf[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv")
    # ranks hold KV groups: rank 1 of 2 the groups 2 and 3, each with its 2 query heads of 4 rows,
    # then k, then v
    expected = np.concatenate([q[16:24], k[8:12], v[8:12], q[24:32], k[12:16], v[12:16]])
    np.testing.assert_array_equal(
        local["decoder.layers.0.self_attention.linear_qkv.weight"], expected
    )
    # the second layer of stage 1; rank 1 of 2 holds experts 2 and 3
    expert = "model.layers.3.mlp.experts.2."
    expected = np.concatenate([hf[f"{expert}gate_proj.weight"], hf[f"{expert}up_proj.weight"]])
    np.testing.assert_array_equal(
        local["decoder.layers.1.mlp.experts.linear_fc1.weight0"], expected
    )
    assert "embedding.word_embeddings.weight" not in local and "output_layer.weight" in local


def test_tied_embeddings_stand_on_both_ends_of_the_pipeline() -> None:
    family = family_of(MAP_DENSE)
    hf = hf_weights(family)
    assert "lm_head.weight" not in hf
    first, last = (
        local_weights(family, Coordinates(pp_rank=rank, pp_size=2), hf) for rank in range(2)
    )
    np.testing.assert_array_equal(
        first["embedding.word_embeddings.weight"], last["output_layer.weight"]
    )


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        (
            {"num_key_value_heads": 3, "num_attention_heads": 6},
            Coordinates(tp_size=2),
            r"num_key_value_heads is 3.*tensor 2",
        ),
        (
            {"num_experts": 3},
            Coordinates(ep_size=2),
            r"num_experts is 3.*actor\.parallel\.expert 2",
        ),
        (
            {"num_hidden_layers": 3},
            Coordinates(pp_size=2),
            r"num_hidden_layers is 3.*actor\.parallel\.pipeline 2",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    change: dict[str, int], at: Coordinates, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        family_of({**MAP_MOE, **change}).local_tensors(at)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (
            {**MAP_MOE, "model_type": "gpt2"},
            r"'gpt2' is not supported; supported: .*qwen3, .*qwen3_moe",
        ),
        ({**MAP_MOE, "hidden_size": None}, "has no hidden_size"),
        ({**MAP_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_models_without_a_map_are_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(hf)
