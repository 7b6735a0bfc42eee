"""Rejection-sampling fine-tuning in one process: it goes on after a checkpoint as if there had been
no break."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.in_process import numbers, train

pytestmark = pytest.mark.slow


def test_a_run_and_its_resumption(tmp_path: Path, settings: list[str]) -> None:
    words = [
        *settings,
        "cluster=in-process",
        "algorithm.flow=rejection",
        "algorithm.flow_options={threshold: 0.1, best: 2}",
        "actor.policy_loss=reinforce",
        "trainer.total_steps=3",
        "trainer.save_every_steps=1",
        "trainer.max_checkpoints_to_keep=0",
    ]
    _, folder = train(tmp_path, words, "whole")
    assert json.loads((folder / "summary.json").read_text())["flow"] == "rejection"
    whole = numbers(folder)
    assert len(whole) == 3 and all(0 < one["flow/chosen"] < 1 for one in whole)
    half = tmp_path / "half"
    shutil.copytree(
        folder, half, ignore=shutil.ignore_patterns("summary.json", "export", "global_step_3")
    )
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_2"}))
    train(tmp_path, words, "half")
    assert numbers(half) == whole
