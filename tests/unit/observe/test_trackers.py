"""A tracker in a file outside of the package is checked, started, fed and told of a resume like the
built-in ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.check import problems
from hybridflow.config.entries import TRACKERS
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tracker import Tracker

SOURCE = """
import json
from hybridflow.observe.trackers.base import tracker

@tracker("lines")
class Lines:
    def __init__(self, run_dir):
        self.path, self.records = run_dir / "lines.json", []

    def log(self, step, phase, wall_time, metrics):
        self.records.append([step, phase, dict(metrics)])

    def truncate_after(self, phase, step):
        self.records = [record for record in self.records if record[1] != phase or record[0] <= step]

    def close(self):
        self.path.write_text(json.dumps(self.records))
"""


def test_a_tracker_of_the_users_own_is_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with Tracker(tmp_path, (f"{tmp_path}/mine.py:lines", "jsonl")) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"a": step / 2})
        tracker.log(3, {"b": 1.0}, "val")
        tracker.truncate_after("train", 1)
    assert json.loads((tmp_path / "lines.json").read_text()) == [
        [1, "train", {"a": 0.5}],
        [3, "val", {"b": 1.0}],
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "{folder}/mine.py:line",
            "mine.py does not register the tracker 'line'; it registers: lines",
        ),
        ("{folder}/mine.py:lines", None),
    ],
)
def test_loggers_are_checked_before_a_run(tmp_path: Path, name: str, complaint: str | None) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    config = load_config(
        "tiny-moe-grpo", [f"trainer.loggers=[console,{name.format(folder=tmp_path)}]"]
    )
    found = [problem for problem in problems(config) if "trainer.loggers" in problem]
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))  # of this folder Python would make a package
    config = load_config("tiny-moe-grpo", ["trainer.loggers=[console,wandb]"])
    [problem] = [problem for problem in problems(config) if "trainer.loggers" in problem]
    assert "package wandb is not installed; run pip install 'hybridflow[wandb]'" in problem
    # a login node may plan what it cannot run
    assert not [one for one in problems(config, files=False) if "trainer.loggers" in one]


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.loggers.*'jsnl'.*did you mean jsonl"):
        load_config("tiny-moe-grpo", ["trainer.loggers=[console,jsnl]"])


def test_the_order_of_loggers_does_not_matter_on_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, ("tensorboard", "jsonl")) as tracker:
        for step in (1, 2):
            tracker.log(step, {"a": float(step)})
        tracker.truncate_after("train", 1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("a")] == [1]


def test_built_in_trackers_are_known_by_their_files() -> None:
    assert {"console", "jsonl", "tensorboard"} <= set(TRACKERS.names())


def test_tensorboard_shows_the_distributions_of_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def logged(tracker: Tracker, step: int, scores: list[float]) -> None:
        path = dump_path(tmp_path / "rollouts", step)
        dump_rollouts(path, {"score": scores, "response_length": [3] * len(scores)})
        tracker.rollouts(step, path)

    with Tracker(tmp_path, ("tensorboard", "jsonl")) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"a": float(step)})
            logged(tracker, step, [0.0, 1.0, float("nan")])
    with Tracker(tmp_path, ("tensorboard", "jsonl")) as tracker:
        tracker.truncate_after("train", 1)
        tracker.log(2, {"a": 2.0})
        logged(tracker, 2, [0.0, 1.0, 1.0, 0.5])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "rollouts"), {"histograms": 0})
    events.Reload()
    found = events.Histograms("rollouts/score")
    assert [(one.step, one.histogram_value.num) for one in found] == [(1, 2), (2, 4)]
    assert found[1].histogram_value.sum == 2.5 and sum(found[1].histogram_value.bucket) == 4
    assert len(events.Histograms("rollouts/response_length")) == 2
