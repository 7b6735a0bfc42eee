"""Safe RLHF in a whole run: two critics and a multiplier, and a run that goes on as one that was not
interrupted."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.e2e.in_process import numbers, train

pytestmark = pytest.mark.slow
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    number = sum(map(ord, solution_str))
    return {"score": number % 7 / 7, "cost": number % 3}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> tuple[Path, list[str]]:
    """The folder of a run of four steps, and its words."""
    out = tmp_path_factory.mktemp("safe_rlhf")
    (out / "costs.py").write_text(REWARD)
    words = [
        *(*settings, "cluster=in-process", "sft.steps=0", "algorithm=safe-rlhf", "+critic=tiny"),
        *("cost_critic.optim.lr=1e-3", "algorithm.kl_coef=0.01", "actor.ppo_mini_batch_size=2"),
        "algorithm.flow_options={limit: 0.5, multiplier: 0.5, lr: 0.2}",
        *(f"reward.path={out / 'costs.py'}", "trainer.total_steps=4", "trainer.save_every_steps=2"),
        "trainer.max_checkpoints_to_keep=0",
    ]
    return train(out, words, "whole")[1], words


def test_both_critics_learn_and_the_multiplier_follows_the_cost(
    run: tuple[Path, list[str]],
) -> None:
    folder, _ = run
    steps = numbers(folder)
    assert len(steps) == 4
    multiplier = 0.5
    for step in steps:
        assert step["flow/multiplier"] == pytest.approx(multiplier, rel=1e-6)
        multiplier *= math.exp(0.2 * multiplier * (step["flow/cost"] - 0.5))
        assert step["flow/cost"] == pytest.approx(step["reward_extra/cost/mean"])
        for critic in ("critic", "cost_critic"):
            assert step[f"{critic}/grad_norm"] > 0 and step[f"{critic}/vf_loss"] > 0
    # they begin as one
    assert steps[0]["cost_critic/values/mean"] == steps[0]["critic/values/mean"]
    assert steps[-1]["cost_critic/values/mean"] != steps[-1]["critic/values/mean"]
    end = folder / "checkpoints" / "global_step_4"
    kept = json.loads((end / "driver.json").read_text())["state"]["flow"]
    assert kept["multiplier"] == pytest.approx(multiplier, rel=1e-6)
    assert (end / "cost_critic" / "manifest.json").is_file()
    planned = json.loads((folder / "summary.json").read_text())["planned"]
    assert "update cost_critic" in str(planned) and "cost values" in str(planned)
    assert "Cost critic" in (folder / "report.html").read_text()


@pytest.mark.full
def test_a_run_that_goes_on_ends_as_one_that_goes_through(run: tuple[Path, list[str]]) -> None:
    whole, words = run
    half = whole.parent / "half"
    ended = ("summary.json", "export*", "global_step_4")
    shutil.copytree(whole, half, ignore=shutil.ignore_patterns(*ended))
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_2"}))
    out, _ = train(whole.parent, words, "half")
    assert "resuming from" in out
    assert numbers(half) == numbers(whole)
    weights = "export/model-00001-of-00001.safetensors"
    assert (half / weights).read_bytes() == (whole / weights).read_bytes()
