"""A reward model that learns beside the policy in a whole run, and goes on as one that was not
interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.forked import ForkedRun
from tests.e2e.in_process import numbers, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> tuple[Path, list[str]]:
    """The folder of a run of four steps, and its words. Policy and reward model begin as one."""
    out = tmp_path_factory.mktemp("learned_reward")
    place = [f"output_dir={out}", "cluster=in-process"]
    with ForkedRun(
        out / "output-sft", "sft", *settings, *place, "name=start", "sft.steps=2"
    ) as sft:
        assert sft.end(120) == 0, sft.out + sft.err
    start = out / "start" / "export"
    words = [
        *(*settings, "cluster=in-process", "sft.steps=0", "algorithm.flow=learned_reward"),
        *(f"model.path={start}", "~model.hf_config", f"reward_model.path={start}"),
        *("reward_model.trains=true", "reward_model.optim.lr=3e-3", "reward.weight=0"),
        *("trainer.total_steps=4", "trainer.save_every_steps=2"),
        "trainer.max_checkpoints_to_keep=0",
    ]
    return train(out, words, "whole")[1], words


def test_the_reward_model_learns_the_order_of_its_pairs(run: tuple[Path, list[str]]) -> None:
    folder, _ = run
    steps = numbers(folder)
    assert len(steps) == 4 and all(step["flow/pairs"] > 0 for step in steps)
    assert all(0 <= step["flow/ordered"] <= 1 for step in steps)
    assert all(step["reward_model/grad_norm"] > 0 for step in steps)
    # the policy is rewarded by the model alone, whose scores move as it learns
    scores = [step["reward_model/counted/mean"] for step in steps]
    assert len(set(scores)) == 4
    assert (folder / "checkpoints" / "global_step_4" / "reward_model").is_dir()


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
