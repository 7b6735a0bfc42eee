"""DPO on recorded pairs: two steps of the recipe in one process, and, at its full length, what the
policy prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.forked import ForkedRun

pytestmark = pytest.mark.slow
RECIPE = "tiny-dpo"


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The records of a run of the recipe."""
    given = ["--config-name", RECIPE, f"output_dir={folder}", f"data.prepare.out={folder / 'data'}"]
    with ForkedRun(folder / "output", "train", *given, *words) as started:
        assert started.end(1200) == 0, started.out + started.err
    return list(read_jsonl(folder / RECIPE / "metrics.jsonl"))


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.full)])
def test_two_steps(tmp_path: Path, name: str) -> None:
    """Policy and reference are the same before the first update and differ after it; engines
    validate alone."""
    small = [
        "data.train_batch_size=8",
        "data.val_max_prompts=8",
        "data.prepare.options.num_pairs=40",
        "sft=none",
    ]
    found = run(
        tmp_path, f"algorithm={name}", "trainer.total_steps=2", "actor.optim.lr=3e-3", *small
    )
    first, second = (record for record in found if record["phase"] == "train")
    assert (
        first["preference/accuracy"] == 0.5
        and first["preference/margin"] == 0 == first["actor/ref_kl"]
    )
    assert (
        second["preference/margin"] != 0 != second["actor/ref_kl"] and second["actor/grad_norm"] > 0
    )
    assert not any(name.startswith(("rollout/logprob_diff", "rollout/mismatch")) for name in second)
    assert [record["step"] for record in found if record["phase"] == "val"] == [0, 2]


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_learns_to_prefer_right_answers(tmp_path: Path, seed: int) -> None:
    """Every pair is new to the policy when its preference is measured: the recipe reads none
    twice."""
    found = run(tmp_path, f"seed={seed}")
    accuracy = [record["preference/accuracy"] for record in found if record["phase"] == "train"]
    assert accuracy[0] == 0.5 and sum(accuracy[-10:]) / 10 >= 0.75
