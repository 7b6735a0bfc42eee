"""Rollout correction where it matters: an engine whose weights are the trainer's with noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.perturbed_engine import NOISE
from tests.e2e.runs import HYBRIDFLOW, Run

pytestmark = [pytest.mark.slow, pytest.mark.full]


def curve(folder: Path, name: str, *words: str) -> list[float]:
    """The held-out accuracy after 0, 25, 50, 75 and 100 steps."""
    engine = Path(__file__).with_name("perturbed_engine.py")
    given = [
        "--config-name",
        "tiny-remax",
        f"rollout.engine={engine}:perturbed",
        "rollout.logprob_diff_bound=null",
    ]
    given += ["sft=warm-start", "trainer.total_steps=100"]
    given += [
        f"output_dir={folder}",
        f"name={name}",
        f"data.prepare.out={folder / 'data'}",
        "trainer.export=false",
    ]
    command = ("env", f"{NOISE}=0.3", "OMP_NUM_THREADS=1", HYBRIDFLOW)
    with Run(folder / f"output-{name}", "train", *given, *words, command=command) as run:
        assert run.end(1500) == 0, run.out + run.err
    records = read_jsonl(folder / name / "metrics.jsonl")
    return [record["val/accuracy"] for record in records if record["phase"] == "val"]


def test_a_perturbed_engine_costs_accuracy_and_with_correction_the_policy_learns(
    tmp_path: Path,
) -> None:
    """ReMax compares samples with the trainer's greedy answer. Those of a worse engine score lower
    in the mean, so that without weights most updates make answers less likely that the policy
    itself would seldom give."""
    without = curve(tmp_path, "without")
    corrected = curve(tmp_path, "corrected", "actor.rollout_correction.weight=sequence")
    assert len(without) == len(corrected) == 5 and without[0] == corrected[0]
    assert max(without[1:]) < without[0] - 0.05  # the standard error of an accuracy is 0.022
    assert corrected[-1] > corrected[0] + 0.15
