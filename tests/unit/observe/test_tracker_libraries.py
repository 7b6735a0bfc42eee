"""wandb, mlflow and trackio over their real libraries, without a network: a run that is killed and
resumed is in the folder of each once, with configuration, samples, distributions and report."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tracker import Tracker
from tests.unit.observe.tracker_folders import read, with_libraries

pytestmark = pytest.mark.slow  # three libraries load in four processes
CONFIG = """
name: sums
seed: 3
trainer: {project: arithmetic, group: seeds, tracked_samples: 3}
actor: {optim: {lr: 1.0e-4}, kinds: [a, b]}
"""
NAMES = ["wandb", "mlflow", "trackio"]


def steps(tracker: Tracker, run_dir: Path, first: int, last: int) -> None:
    if first == 1:
        tracker.log(1, {"sft/loss": 0.5, "timing_s/step": 2.0}, "sft")
    for step in range(first, last + 1):
        # one name is another's folder, one value is not a number
        metrics = {"perf/memory": step / 2, "perf/memory/gen": math.nan, "val/pass@2": 1.0}
        metrics["timing_s/step"] = 1.0
        tracker.log(step, metrics)
        rows = {
            "prompt_text": [f"{step} + {row}" for row in range(8)],
            "response_text": ["7"] * 8,
            "ground_truth": [None] * 8,
            "score": [row / 8 for row in range(8)],
        }
        tracker.rollouts(step, dump_rollouts(dump_path(run_dir / "rollouts", step), rows))
        if step % 2 == 0:
            tracker.log(step, {"val/score": step / 8}, "val")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A run that logs steps 1 to 6 and is killed before it can close its trackers, then resumes
    from step 4 and ends after step 8; what each tracker's folder holds."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(CONFIG)
    program = (
        "import os, signal, pathlib, sys; from hybridflow.observe.tracker import Tracker; "
        "from tests.unit.observe.test_tracker_libraries import steps; "
        "run = pathlib.Path(sys.argv[1]); tracker = Tracker(run, ('jsonl', *sys.argv[2:]), 60); "
    )
    killed = "steps(tracker, run, 1, 6); os.kill(os.getpid(), signal.SIGKILL)"
    resumed = (
        "tracker.truncate_after('train', 4); tracker.truncate_after('val', 4); "
        "steps(tracker, run, 5, 8); (run / 'summary.json').write_text('{}'); (run / 'report.html').write_text('<p>report'); "
        "tracker.report(run / 'report.html'); lost = tracker.close(); assert not lost, lost"
    )
    for part, status in ((killed, -signal.SIGKILL), (resumed, 0)):
        command = [sys.executable, "-c", program + part, str(run_dir), *NAMES]
        done = subprocess.run(
            command, env=with_libraries(), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
    return read(run_dir, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_and_resumed_run_is_there_once(
    folders: dict[str, dict[str, Any]], name: str
) -> None:
    found = folders[name]
    at = "pass_at_2" if name == "mlflow" else "pass@2"
    counted = Counter((metric, step) for metric, step, _ in found["points"])
    for step in range(1, 9):
        for metric in ("perf/memory", "perf/memory/gen", f"val/{at}"):
            assert counted[metric, step] == 1, (metric, step)
        assert counted["val/score", step] == (step % 2 == 0)
    # a warm start has its own steps
    assert counted["timing_s/step", 1] == counted["sft/timing_s/step", 1] == 1
    values = {(metric, step): value for metric, step, value in found["points"]}
    assert values["perf/memory", 7] == 3.5 and math.isnan(values["perf/memory/gen", 7])
    assert len(set(found["ids"])) == 1  # one run
    assert found["config"]["actor"] == {"optim": {"lr": 1e-4}, "kinds": ["a", "b"]}
    assert found["group"] == "seeds" and found["project"] == "arithmetic"
    assert found["name"].startswith("sums")
    [samples] = found["samples"].values()
    prompts = Counter(text for row in samples for text in row if " + " in str(text))
    assert prompts == Counter(f"{step} + {row}" for step in range(1, 9) for row in (0, 3, 7))
    assert found["histograms"] == 8 and found["reports"] == ["<p>report"]
    if name == "wandb":
        assert found["host"] == "-"
    if name == "mlflow":
        assert found["parameters"]["actor.optim.lr"] == "0.0001"
        assert found["status"] == "FINISHED"


@pytest.mark.full
def test_a_run_folder_is_sent_to_a_tracker_later(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(CONFIG)
    (run_dir / "report.html").write_text("<p>report")
    with Tracker(run_dir, ("jsonl",)) as tracker:
        steps(tracker, run_dir, 1, 4)
    command = [sys.executable, "-m", "hybridflow", "track", str(run_dir), "--to", "trackio"]
    for count in (7, 0):  # the second time there is nothing left
        done = subprocess.run(
            command, env=with_libraries(), capture_output=True, text=True, check=True
        )
        assert f"{count} records of {run_dir} sent to trackio" in done.stdout
    found = read(run_dir, ["trackio"])["trackio"]
    counted = Counter((metric, step) for metric, step, _ in found["points"])
    assert counted["val/score", 4] == counted["perf/memory", 3] == 1
    assert found["histograms"] == 4 and len(found["ids"]) == 1
    assert found["reports"] == ["<p>report"]
