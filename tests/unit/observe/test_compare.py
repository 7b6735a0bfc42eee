"""The same step of two runs: what differs, where first, and what is of the clock alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import Jagged
from hybridflow.errors import DataError
from hybridflow.observe.compare import compare_step, describe
from hybridflow.observe.rollouts import dump_path, dump_rollouts

LENGTHS = [2, 0, 3]


def run_of(folder: Path, values: list[float], metrics: dict[str, Any], ids: int = 5) -> Path:
    rows: dict[str, Any] = {
        "score": [0.0, 1.0, 0.5],
        "prompt_ids": Jagged.from_lengths(np.arange(3), [1, 1, 1]),
        "response_ids": Jagged.from_lengths(np.arange(ids), [2, 0, ids - 2]),
        "old_log_probs": Jagged.from_lengths(np.array(values, np.float32), LENGTHS),
    }
    dump_rollouts(dump_path(folder / "rollouts", 4), rows)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 4, "phase": "train", **metrics}) + "\n"
    )
    return folder


def test_each_column_and_metric_is_compared(tmp_path: Path) -> None:
    one = run_of(
        tmp_path / "one",
        [1, 2, 3, np.nan, 5],
        {"actor/loss": 0.5, "actor/lr": None, "perf/tokens": 1},
    )
    two = run_of(
        tmp_path / "two",
        [1, 2, 3.5, np.nan, 4],
        {"actor/loss": 0.25, "actor/lr": None, "perf/tokens": 2},
    )
    found = {difference.name: difference for difference in compare_step(one, two, 4)}
    assert (
        found["score"].differing
        == found["response_ids"].differing
        == found["actor/lr"].differing
        == 0
    )
    column = found["old_log_probs"]
    assert (column.values, column.differing, column.largest, column.first_row) == (5, 2, 1.0, 2)
    assert "perf/tokens" not in found
    text = describe(list(found.values()))
    assert (
        "row 2: 3 -> 3.5" in text
        and "1 of 2 metrics are identical; different:\n  actor/loss  0.5 -> 0.25" in text
    )
    assert not any(difference.differing for difference in compare_step(one, one, 4))
    assert describe(compare_step(one, one, 4)).endswith("2 of 2 metrics are identical")


def test_a_number_that_is_nan_in_one_run_alone_differs(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / str(last), [1, 2, 3, 4, last], {}) for last in (5.0, np.nan))
    assert [d.name for d in compare_step(one, two, 4) if d.differing] == ["old_log_probs"]


def test_other_tokens_and_missing_steps_are_refused(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", [0] * 5, {})
    two = run_of(tmp_path / "two", [0] * 5, {}, ids=6)
    with pytest.raises(DataError, match="because their response_ids differ"):
        compare_step(one, two, 4)
    with pytest.raises(DataError, match=r"step_000005\.parquet: no such file"):
        compare_step(one, one, 5)
    (one / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="training step 4 not found in"):
        compare_step(one, one, 4)
