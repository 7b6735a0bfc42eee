"""Each algorithm's recipe through a whole run of two steps: sampled, scored, corrected, trained, sent to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

CORRECTION = "actor.rollout_correction"
TWICE = ["actor.ppo_epochs=2"]  # the second update of a step differs from the policy that sampled
CASES: dict[str, list[str]] = {
    "dapo-corrected": [
        *TWICE,
        "algorithm=dapo",
        "algorithm.dynamic_sampling=2",
        "algorithm.overlong_filter=true",
        "reward.overlong_tokens=2",
        "rollout.val_samples=4",
        "rollout.val_sampling.temperature=1",
        f"{CORRECTION}.weight=token",
        f"{CORRECTION}.reject={{seq_mean_k1: [0.9, 1.1], token_k3: 0.5}}",
    ],
    "dpo": ["algorithm=dpo"],
    "kto": ["algorithm=kto"],
    "optimal-token-baseline": ["algorithm.adv_estimator=optimal_token_baseline", *TWICE],
    "remax": ["algorithm=remax", *TWICE],
    "gspo": [*TWICE, "algorithm=gspo"],
    "rloo": ["algorithm=rloo", *TWICE],
    "reinforce-plus-plus": ["algorithm=reinforce-plus-plus", *TWICE],
}
IN_EVERY_RUN = {"dapo-corrected", "gspo"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.full) for name in CASES]
)
def test_two_steps(tmp_path: Path, settings: list[str], name: str) -> None:
    """The policy moves, engine and trainer stay at one policy, and what the algorithm reports is reported."""
    words = [*settings, "cluster=in-process", *CASES[name], "trainer.total_steps=2", f"output_dir={tmp_path}"]
    with Run(tmp_path / "output", "train", *words, f"name={name}") as run:
        assert run.end(240) == 0, run.out + run.err
    records: list[dict[str, Any]] = [r for r in read_jsonl(tmp_path / name / "metrics.jsonl") if r["phase"] == "train"]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["rollout/logprob_diff/max"] < 1e-4 and record["actor/grad_norm"] > 0
        assert abs(record["rollout/mismatch/kl"]) < 1e-4 and record["rollout/mismatch/ess"] == pytest.approx(
            1, abs=1e-3
        )
        if name == "remax":
            assert record["timing_s/gen_greedy"] > 0
        if name == "dapo-corrected":
            assert 1 <= record["sampling/batches"] <= 2 and 0 < record["sampling/tokens_used"] <= 1
            assert record["rollout_correction/weight"] == pytest.approx(1, abs=1e-3)
            assert record["rollout_correction/rejected"] == 0


# the first sample that a step scores is never answered
HANGING = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["split"] == "train":
        try:
            os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            while True:
                time.sleep(3600)
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.mark.full
def test_a_reward_that_sleeps_for_ever_on_one_row_of_a_hundred_ends_with_its_deadline(
    tmp_path: Path, settings: list[str]
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING.format(flag=str(tmp_path / "flag")))
    words = [*settings, "cluster=in-process", "data.train_batch_size=25", "rollout.n=4", "trainer.total_steps=1"]
    words += [f"reward.path={tmp_path / 'hanging.py'}", "reward.timeout_s=20", "reward.processes=2"]
    words += [f"output_dir={tmp_path}", "name=hanging"]
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(240) == 0, run.out + run.err
    said = "1 of 100 rows have no score"
    assert said in run.out + run.err and "no score within 20 s (reward.timeout_s)" in run.out + run.err
    [record] = [r for r in read_jsonl(tmp_path / "hanging" / "metrics.jsonl") if r["phase"] == "train"]
    assert record["reward/failed"] == pytest.approx(0.01) and record["actor/grad_norm"] > 0
    rows = read_rollouts(tmp_path / "hanging" / "rollouts" / "step_000001.parquet")
    assert sum("no score within 20 s" in str(row["reward_extra"]) for row in rows) == 1
