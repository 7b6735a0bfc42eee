"""The only engine is killed while it generates, and later the worker beside it: the run goes on in the same step, and misses no sample."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run
from tests.e2e.test_worker_lost import pid_of

STEPS, SAMPLES = 4, 8
# Scores as the other whole runs do. It stands still in the validation at the end of certain steps, when the next thing an engine is asked
# for is the generation of the step after.
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    for step in (1, 2):
        before = not os.path.exists(f"{folder}/e2e/rollouts/step_{step:06d}.parquet")
        if extra_info["split"] == "test" and before and os.path.exists(f"{folder}/e2e/validation/step_{step - 1:06d}.parquet"):
            open(f"{folder}/validating-{step}", "w").close()
            while not os.path.exists(f"{folder}/go-on-{step}"):
                time.sleep(0.02)
            break
    return sum(map(ord, solution_str)) % 7 / 7
"""


def scheduler_of(run: Run) -> int:
    """The process of the engine that computes."""
    run._look()
    names = {pid: name for (pid, _), name in run.seen.items() if psutil.pid_exists(pid)}
    found = [pid for pid, name in names.items() if "sglang" in name and "scheduler" in name]
    assert len(found) == 1, names
    return found[0]


def run_and_kill(tmp_path: Path, settings: list[str], worker_too: bool) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    words = [*settings, "actor=tiny", "cluster=one-process", "rollout=tiny", f"output_dir={tmp_path}", f"trainer.total_steps={STEPS}"]
    words += ["rollout.n=2", f"reward.path={tmp_path / 'reward.py'}", f"+reward.kwargs.folder={tmp_path}", "sft.steps=1"]
    words += ["trainer.test_every_steps=1", f"trainer.max_restarts={1 + worker_too}"]
    folder = tmp_path / "e2e"
    with Run(tmp_path / "output", "train", *words) as run:
        run.wait_for((tmp_path / "validating-1").exists)
        engine = scheduler_of(run)
        os.kill(engine, signal.SIGSTOP)
        (tmp_path / "go-on-1").touch()
        run.wait_for((folder / "rollouts" / "step_000001.parquet").exists)
        time.sleep(2.0)  # the requests of the second step lie in an engine that stands still
        os.kill(engine, signal.SIGKILL)
        run.wait_for((tmp_path / "validating-2").exists)
        if worker_too:
            os.kill(pid_of(run, folder / "logs" / "rollout-rank0.log"), signal.SIGKILL)
        (tmp_path / "go-on-2").touch()
        exit_code = run.end(300)
        left = run.left_behind(within_s=3)
    assert exit_code == 0, run.out + run.err
    assert left == []
    lost = 1 + worker_too
    assert run.out.count("engines start again: ") == lost, run.out
    records = list(read_jsonl(folder / "metrics.jsonl"))
    train = [record for record in records if record["phase"] == "train"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert [record["rollout/restarts"] for record in train] == [0, 1, lost, lost]
    assert {record["trainer/restarts"] for record in train} == {0}
    assert [record["step"] for record in records if record["phase"] == "val"] == list(range(STEPS + 1))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["engine_restarts"], summary["restarts"], summary["steps"]) == (lost, 0, STEPS)
    assert summary["first_ppo_kl_max"] <= 1e-6 and summary["logprob_diff_mean"] <= 1e-4  # the new engine has the present weights
    for step in range(1, STEPS + 1):
        rows = list(read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet"))
        assert len(rows) == SAMPLES and sorted(row["uid"] for row in rows) == sorted([*range(4)] * 2)
        assert {row["weight_version"] for row in rows} == {str(step - 1)}


@pytest.mark.slow
def test_a_run_goes_on_when_its_only_engine_dies_while_it_generates(tmp_path: Path, settings: list[str]) -> None:
    run_and_kill(tmp_path, settings, worker_too=False)


@pytest.mark.slow
@pytest.mark.full
def test_a_run_goes_on_when_the_worker_beside_its_engine_dies_as_well(tmp_path: Path, settings: list[str]) -> None:
    run_and_kill(tmp_path, settings, worker_too=True)
