"""Checkpoints of four ranks: a resumed training is the uninterrupted one bit for bit; broken ones are named, failed saves leave nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.mcore_cases import TINY
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.slow
FULL = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}
Results = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(folder, by rank: the uninterrupted run, the resumed one)."""
    folder = tmp_path_factory.mktemp("checkpoint")
    whole = run_ranks(4, "tests.dist.mcore_cases:save_and_go_on", parallel=FULL, hf=TINY, folder=str(folder), full_disk_on=3)
    good = folder / "good"
    shutil.copytree(good, folder / "torn")
    files = sorted((folder / "torn").glob("*.distcp"))
    os.truncate(max(files, key=lambda path: path.stat().st_size), 100)
    shutil.copytree(good, folder / "empty")
    for file in (folder / "empty").glob("*.distcp"):
        file.unlink()
    resumed = run_ranks(4, "tests.dist.mcore_cases:load_and_go_on", parallel=FULL, hf=TINY, folder=str(folder))
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


def test_a_failed_save_is_reported_on_every_rank_and_leaves_nothing(results: Results) -> None:
    folder, whole, _ = results
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "good", "torn"]
    for rank in whole:
        assert "bad could not be written" in rank["error"] and "previous checkpoint is untouched" in rank["error"]
        assert "File too large" in rank["error"]


def test_missing_and_torn_checkpoints_are_named(results: Results) -> None:
    for rank in results[2]:
        assert "missing is not a whole checkpoint" in rank["errors"]["missing"]
        assert "empty could not be loaded" in rank["errors"]["empty"]
    assert any("torn could not be loaded" in rank["errors"].get("torn", "") for rank in results[2])
