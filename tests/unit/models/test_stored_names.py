"""Where folders have a model's tensors, and configs of folders whose text model is trained alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.config.model_config import MULTIMODAL as REST
from hybridflow.config.model_config import (
    flattened,
    folder_form,
    published_form,
    read_model_config,
)
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.model_folder import check_weights
from hybridflow.models.stored_names import Place, place_of, tower_part
from hybridflow.models.weights import SafetensorsFolder
from tests.models import MULTIMODAL

EXPERT = "model.layers.0.mlp.experts.3."
STACKS = "model.language_model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("name", "held", "place"),
    [
        ("model.norm.weight", "model.norm.weight", ()),
        ("model.norm.weight", "language_model.model.norm.weight", ()),
        ("model.norm.weight", "model.language_model.norm.weight", ()),
        ("lm_head.weight", "language_model.lm_head.weight", ()),
        ("mtp.norm.weight", "model.norm.weight", None),
        (f"{EXPERT}up_proj.weight", f"{STACKS}gate_up_proj", (3, 1)),
        (f"{EXPERT}gate_proj.weight", f"{STACKS}gate_up_proj", (3, 0)),
        (f"{EXPERT}down_proj.weight", "model.layers.0.mlp.experts.down_proj", (3,)),
        (f"{EXPERT}gate_proj.weight", f"{EXPERT}gate_proj.weight", ()),
        (f"{EXPERT}gate_proj.weight", f"{STACKS}down_proj", None),
    ],
)
def test_a_tensor_is_found_under_each_name(
    name: str, held: str, place: tuple[int, ...] | None
) -> None:
    assert place_of(name, {held}) == (None if place is None else Place(held, *place))


def test_parts_of_a_tower_are_known() -> None:
    names = ("model.visual.merger.norm.weight", "vision_tower.a.b", "model.multi_modal_projector.c")
    assert [tower_part(name) for name in names] == [
        "model.visual",
        "vision_tower",
        "model.multi_modal_projector",
    ]
    assert tower_part("model.layers.0.visual.weight") is None


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_read_by_region(transposed: bool, tmp_path: Path) -> None:
    both = torch.randn(4, 6, 5)  # the gate's three rows of each expert, then the other three
    down = torch.randn(4, 5, 3)
    stacks = {f"{STACKS}gate_up_proj": both, f"{STACKS}down_proj": down}
    if transposed:  # only the hidden size tells
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe", "hidden_size": 5}')
        stacks = {name: one.mT.contiguous() for name, one in stacks.items()}
    save_file(stacks, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    for part, whole in (("gate", both[3, :3]), ("up", both[3, 3:]), ("down", down[3])):
        name = f"{EXPERT}{part}_proj.weight"
        assert source.form(name) == (tuple(whole.shape), "F32")
        assert torch.equal(source.read(name, (0, 0), tuple(whole.shape)), whole)
        assert torch.equal(source.read(name, (1, 1), (2, 2)), whole[1:3, 1:3])
    check_weights(tmp_path, [f"{EXPERT}gate_proj.weight"])
    with pytest.raises(ModelError, match="lacks 1 of the 1 tensors"):
        check_weights(tmp_path, ["model.layers.1.mlp.experts.0.gate_proj.weight"])


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_a_config_is_the_text_models_and_comes_back_whole(kind: str) -> None:
    hf = MULTIMODAL[kind]
    flat = flattened(hf)
    assert flat["model_type"] == hf["text_config"]["model_type"]
    assert flattened(flat) == flat
    text = published_form(flat)
    assert REST not in text and "vision_config" not in text
    whole = folder_form(flat)
    assert flattened(whole) == flat
    given = {key: value for key, value in hf.items() if key != "text_config"}
    assert {key: value for key, value in whole.items() if key != "text_config"} == given
    assert whole["text_config"].items() >= hf["text_config"].items()
    family = family_of(hf)
    assert family.tensors() == family_of(text).tensors()
    assert not any(tower_part(name) for name in family.tensors())


def test_sizes_that_a_published_config_leaves_out_are_transformers_defaults() -> None:
    """config.json of google/gemma-3-4b-it has only these sizes."""
    from transformers import Gemma3TextConfig

    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    hf: dict[str, Any] = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {**sizes, "model_type": "gemma3_text", "sliding_window": 1024},
        "vision_config": {},
    }
    family = family_of(hf)
    theirs = Gemma3TextConfig(**sizes)
    shapes = family.tensors()
    assert shapes["model.embed_tokens.weight"] == (theirs.vocab_size, 2560)
    for part, heads in (("q", theirs.num_attention_heads), ("k", theirs.num_key_value_heads)):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert shapes[name] == (heads * theirs.head_dim, 2560)
    assert "lm_head.weight" not in shapes
    assert family.hf["torch_dtype"] == "bfloat16"


def test_a_field_of_the_folder_holds_for_the_text_model() -> None:
    hf = MULTIMODAL["gemma3"] | {"tie_word_embeddings": False}
    assert "lm_head.weight" in family_of(hf).tensors()
    assert folder_form(flattened(hf))["tie_word_embeddings"] is False


def test_a_folders_config_without_that_of_its_text_model_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type gemma3 has no text_config"):
        family_of({"model_type": "gemma3", "vision_config": {}})


def test_a_wrong_size_in_a_text_config_is_named(tmp_path: Path) -> None:
    hf = MULTIMODAL["qwen3_5"]
    text = hf["text_config"] | {"hidden_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"text_config": text}))
    with pytest.raises(ValueError, match="hidden_size=-1"):
        read_model_config(tmp_path / "config.json")
