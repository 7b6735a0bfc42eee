"""Exports of a text model that is trained next to a vision tower: every tensor of the folder, where
the folder has it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hybridflow.doctor import weights
from hybridflow.doctor.model import examine
from hybridflow.models import family_of
from hybridflow.models.stored_names import tower_part
from hybridflow.saving.carried import carried_from
from hybridflow.saving.tools import import_
from tests.models import MULTIMODAL
from tests.published.multimodal import (
    NEWER,
    OLDER,
    config_of,
    multimodal_folder,
    read_by_transformers,
    tensors_in,
)

FOLDERS = [
    *(("gemma3", prefix) for prefix in (OLDER, NEWER)),
    *(("mistral3", prefix) for prefix in (OLDER, NEWER)),
    *((kind, None) for kind in MULTIMODAL if kind not in ("gemma3", "mistral3")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "prefix"), FOLDERS)
def test_a_copy_has_the_form_of_its_folder(kind: str, prefix: str | None, tmp_path: Path) -> None:
    folder = multimodal_folder(kind, tmp_path / "hf", prefix=prefix)
    came = tensors_in(folder)
    if prefix is not None:
        assert sum(name.startswith(prefix) for name in came) > 20
    done = import_(folder, tmp_path / "out", None, 20_000)
    went = tensors_in(tmp_path / "out")
    assert went.keys() == came.keys()
    assert all(torch.equal(went[name], came[name]) for name in came)
    assert "were copied unchanged" in done.lines[0] and len(done.lines) == 1
    before, after = config_of(folder), config_of(tmp_path / "out")
    assert {name: after[name] for name in before if name != "text_config"} == {
        name: value for name, value in before.items() if name != "text_config"
    }
    read_by_transformers(tmp_path / "out")


def test_experts_are_written_as_they_came(tmp_path: Path) -> None:
    written = []
    for stacked in (True, False):
        folder = multimodal_folder("qwen3_5_moe", tmp_path / f"{stacked}", stacked=stacked)
        import_(folder, tmp_path / f"{stacked}-out", None, 20_000)
        written.append(tensors_in(tmp_path / f"{stacked}-out"))
    stacks, ones = written
    prefix = "model.language_model.layers.1.mlp.experts."
    for expert in range(4):
        both = torch.cat([ones[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(stacks[f"{prefix}gate_up_proj"][expert], both)
        down = ones[f"{prefix}{expert}.down_proj.weight"]
        assert torch.equal(stacks[f"{prefix}down_proj"][expert], down)
    assert f"{prefix}gate_up_proj" not in ones and f"{prefix}0.up_proj.weight" not in stacks


def test_without_a_tower_the_copy_is_a_text_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = multimodal_folder("qwen3_5_moe", tmp_path / "hf")
    import_(folder, tmp_path / "out", None, 1 << 30, alone=True)
    went = tensors_in(tmp_path / "out")
    assert went.keys() == family_of(config_of(folder)).tensors().keys()
    assert config_of(tmp_path / "out")["model_type"] == "qwen3_5_moe_text"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = multimodal_folder("gemma3", tmp_path / "hf")
    family = family_of(config_of(folder))
    carried = carried_from(folder, family)
    assert carried.is_multimodal and all(tower_part(entry.name) for entry in carried.entries)
    shutil.rmtree(folder)
    carried = carried_from(folder, family)
    assert not carried.is_multimodal and not carried.places
    assert "which is the text model alone (model_type gemma3_text)" in carried.lines[0]


@pytest.mark.slow
def test_the_doctor_counts_text_and_tower_apart(tmp_path: Path) -> None:
    folder = multimodal_folder("mistral3", tmp_path / "hf", tokenizer=True)
    tower = sum(one.numel() for name, one in tensors_in(folder).items() if tower_part(name))
    found = {one.topic: one.what for one in examine(folder) if one.level == "ok"}
    assert found["config"].startswith("mistral (MistralForCausalLM), 4 layers, ")
    assert found["vision tower"] == (
        f"{tower / 1e6:,.1f} million parameters, which are not trained"
    )
    assert "are copied unchanged to an export" in found["other weights"]
    folder = multimodal_folder("qwen3_5", tmp_path / "images")
    found = {one.topic: one.what for one in weights.findings(folder, family_of(config_of(folder)))}
    assert found["vision tower"].endswith("used only in runs with data.image_key")
