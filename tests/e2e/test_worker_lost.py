"""Ranks are killed in the middle of steps: the same process starts them again and goes on, from the
last checkpoint where they train."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run, pid_of

pytestmark = pytest.mark.slow
STEPS = 5
TWO_RANKS = (
    "actor=tiny",
    "cluster.procs_per_node=2",
    "actor.parallel.tensor=2",
    "actor.parallel.sequence=true",
)
# Scores as the other whole runs do, but stands still in the fourth step until the test has done its
# deed.
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    if os.path.exists(f"{folder}/e2e/rollouts/step_000003.parquet") and not os.path.exists(f"{folder}/killed"):
        open(f"{folder}/in-step-4", "w").close()
        while not os.path.exists(f"{folder}/killed"):
            time.sleep(0.02)
    return sum(map(ord, solution_str)) % 7 / 7
"""


def in_force(folder: Path) -> str:
    """The name of the last whole checkpoint."""
    pointer = folder / "checkpoints" / "latest.json"
    return str(json.loads(pointer.read_text())["folder"]) if pointer.exists() else ""


@pytest.mark.full
def test_a_killed_policy_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(
    tmp_path: Path, settings: list[str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        *settings,
        *TWO_RANKS,
        f"output_dir={tmp_path}",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=2",
        "rollout.n=2",
    ]
    words += [
        f"reward.path={tmp_path / 'reward.py'}",
        f"+reward.kwargs.folder={tmp_path}",
        "sft.steps=1",
    ]
    folder = tmp_path / "e2e"
    with Run(tmp_path / "output", "train", *words) as run:
        run.wait_for((tmp_path / "in-step-4").exists)
        # it is written while the run goes on
        run.wait_for(lambda: in_force(folder) == "global_step_2")
        os.kill(pid_of(run, folder / "logs" / "actor-rank1.log"), signal.SIGKILL)
        (tmp_path / "killed").touch()
        exit_code = run.end(300)
        left = run.left_behind()
    assert exit_code == 0, run.err
    assert left == []
    assert "the worker process died" in run.out and "continuing after step 2" in run.out
    records = list(read_jsonl(folder / "metrics.jsonl"))
    train = [record for record in records if record["phase"] == "train"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert [record["trainer/restarts"] for record in train] == [0, 0, 1, 1, 1]
    assert [record["step"] for record in records if record["phase"] == "val"] == [0, STEPS]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["restarts"], summary["steps"]) == (1, STEPS)
    # the engines have the restored weights
    assert summary["first_ppo_kl_max"] <= 1e-6 and summary["logprob_diff_mean"] <= 1e-4
    for step in range(1, STEPS + 1):
        assert {
            row["weight_version"]
            for row in read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
        } == {str(step - 1)}


# Stands still in the steps whose number a file `wanted-N` names, until the test has removed it.
REWARD_OF_MANY = """
import glob, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    step = 1 + len(glob.glob(f"{folder}/e2e/rollouts/step_*.parquet"))
    while os.path.exists(f"{folder}/wanted-{step}"):
        open(f"{folder}/in-step-{step}", "w").close()
        time.sleep(0.02)
    return sum(map(ord, solution_str)) % 7 / 7
"""
KILLED = {1: "actor", 3: "reference", 4: "critic"}


def test_lost_ranks_of_each_role_cost_what_that_role_knows_and_no_more(
    tmp_path: Path, settings: list[str]
) -> None:
    """The policy in the first step, after a warm start: back to its end. The reference: the step
    goes on. The critic: back to the last checkpoint, with the policy."""
    (tmp_path / "reward.py").write_text(REWARD_OF_MANY)
    for step in KILLED:
        (tmp_path / f"wanted-{step}").touch()
    words = [
        *settings,
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        "rollout.n=2",
        f"output_dir={tmp_path}",
    ]
    words += ["algorithm=ppo", "+critic=tiny-own", "critic.procs=1", "critic.parallel.pipeline=1"]
    words += [
        "reference.placement=own",
        "sft.steps=1",
        "trainer.max_restarts=2",
        "trainer.save_every_steps=2",
    ]
    words += [f"trainer.total_steps={STEPS}", f"reward.path={tmp_path / 'reward.py'}"]
    folder = tmp_path / "e2e"
    with Run(tmp_path / "output", "train", *words, f"+reward.kwargs.folder={tmp_path}") as run:
        for step, role in KILLED.items():
            run.wait_for((tmp_path / f"in-step-{step}").exists)
            run.wait_for(lambda step=step: in_force(folder) == f"global_step_{(step - 1) // 2 * 2}")
            os.kill(pid_of(run, folder / "logs" / f"{role}-rank0.log"), signal.SIGKILL)
            (tmp_path / f"wanted-{step}").unlink()
        exit_code = run.end(400)
        left = run.left_behind()
    assert exit_code == 0, run.err
    assert left == []
    assert "continuing after step 0" in run.out and "continuing after step 2" in run.out
    assert run.out.count("restarting the ranks of the reference") == 1
    train = [
        record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == "train"
    ]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert [record["trainer/restarts"] for record in train][:2] == [1, 1]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["restarts"], summary["steps"]) == (3, STEPS)
    assert summary["first_ppo_kl_max"] <= 1e-6 and summary["logprob_diff_mean"] <= 1e-4
