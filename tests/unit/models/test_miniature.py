"""Small copies of published sizes: the same architecture, and sensitive to what a config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.model_config import with_tower
from hybridflow.doctor import parity
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.family import num_parameters
from hybridflow.models.hybrid_decoder import HybridDecoder
from hybridflow.models.miniature import miniature
from hybridflow.models.published import published, published_names
from hybridflow.models.vision import tower_of
from tests.models import VISIONS

CHANGES: dict[str, Any] = {
    "rms_norm_eps": lambda value: value * 10,
    "rope_theta": lambda value: value * 1.001,
    "routed_scaling_factor": lambda value: value * 1.0004,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", published_names())
def test_a_copy_is_small_and_of_the_same_architecture(name: str) -> None:
    whole = published(name)
    small = miniature(published(name))
    family = family_of(whole)
    copy = family_of(small)
    assert num_parameters(copy) < 2e6 and copy.architecture == family.architecture
    kinds = {tensor.split(".", 3)[-1] for tensor in copy.tensors()}
    assert {
        tensor.split(".", 3)[-1] for tensor in family.tensors() if ".experts." not in tensor
    } <= kinds
    same = {
        key for key, value in whole.items() if not isinstance(value, int) or isinstance(value, bool)
    }
    assert {key for key in same if small.get(key) != whole[key]} <= {"dtype"}


@pytest.mark.parametrize("name", ["qwen3-8b", "glm-4.5-air"])
def test_what_a_config_says_moves_a_copys_log_probs_beyond_the_bound(
    name: str, tmp_path: Path
) -> None:
    hf = miniature(published(name))
    family = family_of(hf)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    parity.write_weights(family, tmp_path)
    ids = parity.sequences(family.vocab_size)
    reference = parity.reference_class(family)
    right = parity.log_probs(reference, family, tmp_path, ids)
    for key, change in CHANGES.items():
        if key in hf:
            other = family_of({**hf, key: change(hf[key])})
            assert (
                parity.log_probs(reference, other, tmp_path, ids) - right
            ).abs().max() > 1.5 * parity.BOUND, key


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        ({"full_attention_interval": 4}, 4),
        ({"layer_types": ["linear_attention", "full_attention"] * 24}, 2),
    ],
)
def test_a_copy_has_a_delta_net_and_attention(kinds: dict[str, Any], count: int) -> None:
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    hf = {"model_type": "qwen3_5_text", "num_hidden_layers": 48, "num_attention_heads": 16}
    copy = miniature({**hf, **sizes, **heads, **kinds})
    decoder = family_of(copy)
    assert isinstance(decoder, HybridDecoder)
    assert decoder.linear == (*[True] * (count - 1), False)
    assert decoder.value_heads == 2 * decoder.key_heads


@pytest.mark.parametrize("kind", VISIONS)
def test_a_copy_has_a_tower_and_deepstack_if_the_model_has(kind: str) -> None:
    given = with_tower(VISIONS[kind])
    tower = tower_of(family_of(miniature(given)))
    assert tower is not None and tower.sizes["depth"] == 2
    assert tower.deepstack == ((0,) if kind.startswith("qwen3_vl") else ())
    del given["vision_config"]
    with pytest.raises(ModelError, match="has no vision_config"):
        miniature(given)
