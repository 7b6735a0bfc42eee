"""The folders are whole, the same for the same seed, and their code stays untouched while they are
read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.published.folders import FAMILIES, FAULTS, break_folder, code_ran, published_folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_whole_and_follows_from_its_seed(family: str, tmp_path: Path) -> None:
    folder, again = (published_folder(family, tmp_path / name) for name in ("one", "two"))
    other = published_folder(family, tmp_path / "three", seed=1)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    weights = [name for name in files if name.suffix == ".safetensors"]
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in weights)
    assert all((folder / name).read_bytes() != (other / name).read_bytes() for name in weights)
    held = {}
    for name in weights:
        with safe_open(folder / name, framework="pt") as handle:
            held |= dict.fromkeys(handle.keys(), name.name)
    if len(weights) > 1:
        assert (
            json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"] == held
        )
    config = json.loads((folder / "config.json").read_text())
    assert any(name.endswith("_scale_inv") for name in held) == ("quantization_config" in config)
    heads = config.get("num_nextn_predict_layers") or 0
    assert sum(name.endswith("eh_proj.weight") for name in held) == heads
    assert not code_ran(folder)


def test_a_change_of_the_config_is_followed_by_the_tensors(tmp_path: Path) -> None:
    folder = published_folder(
        "glm-4.5", tmp_path, shards=1, num_nextn_predict_layers=0, num_hidden_layers=1
    )
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        assert not [name for name in handle.keys() if name.startswith("model.layers.1.")]  # noqa: SIM118


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_differs_in_the_file_that_is_named(fault: str, tmp_path: Path) -> None:
    whole = published_folder("qwen3-moe", tmp_path / "whole")
    broken = published_folder("qwen3-moe", tmp_path / "broken")
    wrong = break_folder(broken, fault)
    for file in whole.iterdir():
        same = (broken / file.name).exists() and (
            broken / file.name
        ).read_bytes() == file.read_bytes()
        assert same == (file.name != wrong.name), file.name
