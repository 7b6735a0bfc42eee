"""A vision-language model against transformers on the same weights: log-probs and gradients of packed
rows with none, one and three images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.cases.vision import LAYOUTS
from tests.dist.harness.ranks import run_ranks
from tests.models import VISION, VISIONS
from tests.published.multimodal import (
    config_of,
    multimodal_folder,
    read_by_transformers,
    tensors_in,
)

pytestmark = pytest.mark.slow
BOUND = 1e-5


def check(cases: list[list[Any]], folder: Path) -> None:
    found = run_ranks(
        2, "tests.dist.cases.vision:run_cases", cases=cases, folder=str(folder), timeout_s=300
    )[0]
    assert len(found) == len(cases)
    for one, (_, _, is_trained) in zip(found, cases, strict=True):
        moved = {"language model": True, "tower": is_trained, "reference": False, "loaded": False}
        assert one["moved"] == moved, one
        assert one["log_probs"] < BOUND and one["missing in a checkpoint"] == 0, one
        assert not is_trained or one["gradient"] < BOUND, one


def test_rows_with_images_are_computed_as_by_transformers(tmp_path: Path) -> None:
    cases = [
        ["qwen3_vl", "TP2 SP", True],
        ["qwen3_vl", "PP2", False],
        ["qwen3_5", "TP2 SP", True],
        ["qwen3_vl_moe", "EP2", True],
    ]
    check(cases, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", VISIONS)
def test_every_layout_with_the_tower_frozen_and_trained(kind: str, tmp_path: Path) -> None:
    other = "TP2" if kind.endswith("_moe") else "EP2"  # mixtures need sequence parallelism
    layouts = [one for one in LAYOUTS if one != other]
    check([[kind, layout, trained] for layout in layouts for trained in (False, True)], tmp_path)


def test_a_published_folder_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    folders = [multimodal_folder(kind, tmp_path / kind, images=True) for kind in VISIONS]
    # as transformers saves it: stacked, but not transposed
    folders.append(
        multimodal_folder("qwen3_vl_moe", tmp_path / "saved", stacked=False, images=True)
    )
    given = [str(folder) for folder in folders]
    [found] = run_ranks(1, "tests.dist.cases.vision:copy", folders=given, timeout_s=200)
    assert max(found) < BOUND, found
    for folder in folders:
        copy = folder.with_name(f"{folder.name}-copy")
        came, went = tensors_in(folder), tensors_in(copy)
        assert went.keys() == came.keys()
        assert all(torch.equal(went[name], came[name]) for name in came)
        before, after = config_of(folder), config_of(copy)
        for name in ("model_type", "architectures", "vision_config", "image_token_id"):
            assert after[name] == before[name]
        for exported in (copy, folder.with_name(f"{folder.name}-alone")):
            model = read_by_transformers(exported).state_dict()
            given = read_by_transformers(folder).state_dict()
            assert all(torch.equal(model[name], given[name]) for name in given)


def test_an_export_is_a_published_folder(tmp_path: Path) -> None:
    run_ranks(
        1,
        "tests.dist.cases.mcore:log_probs_and_export",
        parallel={},
        hf=VISION,
        folder=str(tmp_path / "export"),
        max_tokens=64,
    )
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["vision_config"] == VISION["vision_config"]
    text = dict(written["text_config"])
    assert {text.pop(name) for name in ("dtype", "torch_dtype")} == {"float32"}
    assert text == {**VISION["text_config"], "tie_word_embeddings": False}
    assert "num_hidden_layers" not in written
