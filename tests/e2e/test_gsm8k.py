"""The recipe `gsm8k-smoke` from raw files to its summary: two GRPO steps on word problems of
GSM8K's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
PROBLEMS = [
    {
        "question": (
            f"Anna has {first} apples and buys {second} more. How many apples does she have?"
        ),
        "answer": f"She has {first} + {second} = {first + second} apples.\n#### {first + second}",
    }
    for first in range(1, 5)
    for second in range(1, 5)
]


@pytest.mark.parametrize("place", ["in-process", pytest.param("shipped", marks=pytest.mark.full)])
def test_the_recipe_trains_on_files_as_published(tmp_path: Path, place: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(
            "".join(json.dumps(problem) + "\n" for problem in PROBLEMS)
        )
    words = [
        "--config-name",
        "gsm8k-smoke",
        "data.prepare.task=gsm8k",
        f"data.prepare.source={source}",
        f"data.prepare.out={tmp_path / 'data'}",
        "data.max_response_length=32",
        "data.val_max_prompts=4",
        f"output_dir={tmp_path}",
        *(["cluster=in-process"] if place == "in-process" else []),
    ]
    run_of = ForkedRun if place == "in-process" else Run
    with run_of(tmp_path / "output", "train", *words) as run:
        assert run.end(400) == 0, run.out + run.err
        assert run.left_behind() == []
    folder = tmp_path / "gsm8k-smoke"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and 0 < summary["logprob_diff_max"] <= 1e-3
    for step in (1, 2):
        rows = list(read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet"))
        assert len(rows) == 16 and {row["score"] for row in rows} <= {0.0, 1.0}
