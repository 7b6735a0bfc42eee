"""The recipe of distillation: two steps in one process, and, at its full length, what the student
learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.forked import ForkedRun
from tests.e2e.teachers import TEACHER, random_teacher

pytestmark = pytest.mark.slow
RECIPE = "tiny-distill"


def finish(folder: Path, command: str, recipe: str, *words: str) -> Path:
    """A whole run; its folder."""
    given = [
        "--config-name",
        recipe,
        f"output_dir={folder}",
        f"data.prepare.out={folder / 'data' / recipe}",
    ]
    with ForkedRun(folder / "output", command, *given, *words) as run:
        assert run.end(1200) == 0, run.out + run.err
    return folder / recipe


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == phase]


@pytest.mark.parametrize("loss", ["forward_kl_topk", pytest.param("k3+", marks=pytest.mark.full)])
def test_two_steps(tmp_path: Path, loss: str) -> None:
    """The policy moves by what a teacher in its own process says, and by nothing else."""
    words = [
        f"teacher.path={random_teacher(tmp_path / 'teacher')}",
        f"actor.distillation.loss={loss}",
    ]
    words += [
        "trainer.total_steps=2",
        "sft=none",
        "data.train_batch_size=8",
        "data.val_max_prompts=8",
    ]
    words += ["actor.ppo_mini_batch_size=8"]  # one update a step: its loss is that of the step
    folder = finish(tmp_path, "train", RECIPE, *words)
    first, second = records(folder, "train")
    for record in (first, second):
        assert record["actor/pg_loss"] == 0 and record["actor/grad_norm"] > 0
        assert record["actor/loss"] == pytest.approx(record["actor/distillation_loss"], rel=1e-6)
        assert record["rollout/logprob_diff/max"] < 1e-4
        assert ("teacher/top_mass" in record) == (loss == "forward_kl_topk")
    assert 0 < first["actor/distillation_loss"] != second["actor/distillation_loss"]


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_student_learns_what_the_teacher_knows(tmp_path: Path, seed: int) -> None:
    teacher = finish(tmp_path, "sft", TEACHER) / "export"
    folder = finish(tmp_path, "train", RECIPE, f"teacher.path={teacher}", f"seed={seed}")
    before, *_, after = records(folder, "val")
    assert before["val/accuracy"] < 0.5 and after["val/accuracy"] >= 0.85
