"""A run that trains while its engine goes on: real ranks, a real engine, answers of older
weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.batch import read_parquet
from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
STEPS = 4
STALENESS = 2


def test_steps_train_on_answers_of_older_weights_each_prompt_once(
    tmp_path: Path, settings: list[str]
) -> None:
    words = [
        *settings,
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        f"output_dir={tmp_path}",
        "sft.steps=0",
        f"trainer.total_steps={STEPS}",
        f"trainer.max_staleness={STALENESS}",
        f"trainer.steps_ahead={STALENESS}",
        "actor.rollout_correction.weight=token",
        "trainer.val_before_train=false",
        "trainer.export=false",
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(400) == 0, run.out + run.err
        left = run.left_behind()
    assert left == []
    records = [
        one for one in read_jsonl(tmp_path / "e2e" / "metrics.jsonl") if one["phase"] == "train"
    ]
    assert [one["rollout/staleness/max"] for one in records] == [0, 1, 2, 2]
    assert records[-1]["rollout/groups_left"] == 0
    trained: Counter[int] = Counter()
    size: int | None = None
    for step, record in enumerate(records, start=1):
        batch = read_parquet(tmp_path / "e2e" / "rollouts" / f"step_{step:06d}.parquet")
        versions = batch.jagged("response_versions").values[:, 0]  # runs of tokens: version, length
        assert versions.min() >= step - 1 - STALENESS and versions.max() <= step - 1
        trained.update(json.loads(row)["index"] for row in batch["extra_info"])
        size = len(batch)
        assert record["actor/grad_norm"] > 0
        # the weights of a step before say something else of these tokens than the present ones
        assert (
            record["rollout/mismatch/ess"] < 1 - 1e-6
            if step > 1
            else record["rollout/mismatch/ess"] > 1 - 1e-6
        )
    # the engine answered the prompts of three steps with the first weights, while the policy
    # trained
    assert [one["rollout/staleness/mean"] for one in records] == [0, 1, 2, 2]
    assert size is not None and set(trained.values()) == {4} and len(trained) == STEPS * size // 4
    assert (
        0 < json.loads((tmp_path / "e2e" / "summary.json").read_text())["logprob_diff_max"] <= 1e-4
    )
