"""Each algorithm's recipe through a whole run of two steps: sampled, scored, corrected, trained, sent to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
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
