"""Checkpoints of four ranks: training resumed in any layout is the uninterrupted one; broken ones
are named, failed saves leave nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.saving.manifest import Manifest, problems_of
from tests.dist.harness.policies import FULL
from tests.dist.harness.ranks import run_ranks
from tests.models import TINY

pytestmark = pytest.mark.slow
OTHER = {"wider": {"hidden_size": 64}, "foreign": {"model_type": "llama"}}
Results = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(folder, by rank: the uninterrupted run)."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_ranks(
        4,
        "tests.dist.cases.checkpoint:save_and_go_on",
        parallel=FULL,
        hf=TINY,
        folder=str(folder),
        full_disk_on=3,
    )


@pytest.fixture(scope="module")
def results(saved: tuple[Path, list[dict[str, Any]]]) -> Results:
    """(folder, by rank: the uninterrupted run, the resumed one)."""
    folder, whole = saved
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["good", "good.saved"], left  # the failed saves have left nothing
    largest = max((folder / "good").glob("*.bin"), key=lambda path: path.stat().st_size).name
    for name in ("torn", "flipped", "empty", "unmarked"):
        shutil.copytree(folder / "good", folder / name)
    os.truncate(folder / "torn" / largest, 100)
    with (folder / "flipped" / largest).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    for file in (folder / "empty").glob("*.bin"):
        file.unlink()
    (folder / "unmarked" / "manifest.json").unlink()
    broken = ["missing", "torn", "flipped", "empty", "unmarked"]
    resumed = run_ranks(
        4,
        "tests.dist.cases.checkpoint:load_and_go_on",
        parallel=FULL,
        hf=TINY,
        folder=str(folder),
        broken=broken,
        other=OTHER,
    )
    return folder, whole, resumed


def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(results: Results) -> None:
    _, whole, resumed = results
    for expected, found in zip(whole, resumed, strict=True):
        assert len(found["history"]) == 3 and all(norm > 0 for norm, _ in found["history"])
        for key in ("history", "weights", "reference", "random"):
            assert found[key] == expected[key], key
    assert len({str(rank["history"]) for rank in whole}) == 1  # all ranks took the same steps
    rates = [rate for _, rate in whole[0]["history"]]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]  # the schedule went on too


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {}),
        (2, {}),
        (2, {"distributed_optimizer": False}),
        pytest.param(2, {"tensor": 2, "sequence": True}, marks=pytest.mark.full),
        (4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
        pytest.param(2, {"context": 2, "expert_tensor": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor": 2, "expert": 2, "sequence": True}, marks=pytest.mark.full),
    ],
)
def test_another_layout_goes_on_as_the_uninterrupted_run(
    saved: tuple[Path, list[dict[str, Any]]], world: int, parallel: dict[str, Any]
) -> None:
    """Optimizer included: steps 4 to 6 (counted from one) of TP2·PP2·EP2, in one process, DP2,
    PP2·VPP2·EP2 and others."""
    folder, whole = saved
    resumed = run_ranks(
        world,
        "tests.dist.cases.checkpoint:load_and_go_on",
        parallel=parallel,
        hf=TINY,
        folder=str(folder),
        broken=[],
        other={},
    )
    np.testing.assert_allclose(
        [rank["history"] for rank in resumed], [whole[0]["history"]] * world, rtol=1e-5
    )
    for part in ("weights", "reference"):
        expected = merged(whole, part)
        found = merged(resumed, part)
        assert found.keys() == expected.keys() and len(found) > 40
        for name, values in expected.items():
            np.testing.assert_allclose(
                found[name], values, rtol=1e-5, atol=1e-5, err_msg=f"{part} {name}"
            )


def test_the_configured_optimizer_settings_count_after_a_resume(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    """The checkpoint was saved with lr 1e-2, a linear decay and weight decay 0.1."""
    folder, _ = saved
    [found] = run_ranks(
        1,
        "tests.dist.cases.checkpoint:resume_with_other_settings",
        parallel={},
        hf=TINY,
        folder=str(folder),
    )
    assert found == {"rate": 1e-5, "decays": [0.0, 0.3]}


def merged(ranks: list[dict[str, Any]], part: str) -> dict[str, list[float]]:
    return {name: values for rank in ranks for name, values in rank[part].items()}


def test_a_failed_save_is_reported_on_every_rank(results: Results) -> None:
    for rank in results[1]:
        for name in ("bad", "later"):
            assert (
                f"{name} could not be written" in rank["errors"][name]
                and "previous checkpoint is untouched" in rank["errors"][name]
            )
            assert (
                "rank 3: File too large" in rank["errors"][name]
                and "unexpected pos" not in rank["errors"][name]
            )


def test_missing_torn_and_foreign_checkpoints_are_named_and_nothing_is_loaded(
    results: Results,
) -> None:
    for rank in results[2]:
        errors = rank["errors"]
        assert "missing is not a complete checkpoint" in errors["missing"]
        assert (
            "unmarked is not a complete checkpoint (no manifest.json in it)" in errors["unmarked"]
        )
        assert (
            "torn" in errors["torn"]
            and ".bin has 100 bytes, but the manifest lists" in errors["torn"]
        )
        assert ".bin does not match its hash" in errors["flipped"]
        assert ".bin cannot be read: No such file" in errors["empty"]
        assert "hidden_size is 32 in the checkpoint, 64 here" in errors["wider"]
        assert "a checkpoint of family qwen3_moe, but the model is llama" in errors["foreign"]
        assert rank["untouched"]


def test_the_manifest_describes_what_was_saved(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = saved[0] / "good"
    manifest = Manifest.read(folder)
    assert (manifest.phase, manifest.step, manifest.family, manifest.dtype) == (
        "rl",
        2,
        "qwen3_moe",
        "float32",
    )
    assert manifest.contains == ("model", "optimizer", "reference", "rng")
    assert manifest.layout == {
        "world": 4,
        "tensor": 2,
        "pipeline": 2,
        "expert": 2,
        "expert_tensor": 1,
        "context": 1,
    }
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert problems_of(folder, manifest) == []
    assert set(manifest.versions) == {"hybridflow", "torch", "megatron_core"}
