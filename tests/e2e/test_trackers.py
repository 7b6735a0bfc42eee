"""Whole runs with the trackers of other projects, without a network."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.observe.append_only import own_name
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.trackers.base import RESERVED
from hybridflow.observe.trackers.mlflow import metric_name
from tests.e2e.runs import Run
from tests.unit.observe.tracker_folders import read, with_libraries

pytestmark = [pytest.mark.slow, pytest.mark.full]
TRACKERS = ("wandb", "mlflow")


def test_a_killed_and_resumed_run_is_in_its_trackers_once(
    tmp_path: Path, settings: list[str]
) -> None:
    words = [
        *settings,
        "cluster=in-process",
        "trainer.total_steps=6",
        "trainer.save_every_steps=2",
        "trainer.test_every_steps=2",
        f"trainer.loggers=[console,jsonl,{','.join(TRACKERS)}]",
        "trainer.project=e2e",
        "trainer.group=kills",
        f"output_dir={tmp_path}",
    ]
    run_dir = tmp_path / "e2e"
    with Run(tmp_path / "first", "train", *words, site=with_libraries()) as run:
        # after the checkpoint of step 2: step 3 is repeated
        run.wait_for(lambda: ("train", 3) in logged(run_dir))
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
    with Run(tmp_path / "second", "train", *words, site=with_libraries()) as run:
        assert run.end() == 0, run.out + run.err
        assert "resuming from" in run.out and "records were lost" not in run.out
        assert run.left_behind() == []
    wanted = Counter(
        (own_name(record["phase"], name), record["step"])
        for record in read_jsonl(run_dir / "metrics.jsonl")
        for name in record.keys() - RESERVED
    )
    assert set(wanted.values()) == {1} and len(wanted) > 400
    assert [step for phase, step in logged(run_dir) if phase == "train"] == [1, 2, 3, 4, 5, 6]
    found = read(run_dir, TRACKERS)
    for name in TRACKERS:
        change = metric_name if name == "mlflow" else str
        points = Counter((metric, step) for metric, step, _ in found[name]["points"])
        for (metric, step), _ in wanted.items():
            assert points[change(metric), step] == 1, (name, metric, step)
        assert found[name]["config"]["trainer"]["total_steps"] == 6
        assert (found[name]["project"], found[name]["group"]) == ("e2e", "kills")
        assert len(set(found[name]["ids"])) == 1
        kinds = {kind.partition("/")[0] for kind in found[name]["samples"]}
        assert kinds == {"rollouts", "validation"}
        assert len(found[name]["reports"]) == 1 and "<html" in found[name]["reports"][0]
    # the values are those of the first time, which a resumed run repeats exactly
    ours = {
        (name, record["step"]): value
        for record in read_jsonl(run_dir / "metrics.jsonl")
        if record["phase"] == "train"
        for name, value in record.items()
    }
    theirs = {(metric, step): value for metric, step, value in found["wandb"]["points"]}
    for step in range(1, 7):
        assert theirs["critic/score/mean", step] == ours["critic/score/mean", step]


def logged(run_dir: Path) -> list[tuple[str, int]]:
    """(phase, step) of the records so far."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    return [(record["phase"], record["step"]) for record in records]
