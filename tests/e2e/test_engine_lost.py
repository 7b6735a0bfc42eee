"""The only engine or a worker of it, on its first node or another, is killed: the run goes on in
the same step, and misses no sample."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run, pid_of

STEPS = 4
SAMPLES = 8
# Scores as the other whole runs do. It stands still in the validation at the end of certain steps,
# when the next thing an engine is asked for is the generation of the step after.
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    for step in (1, 2):
        before = not os.path.exists(f"{folder}/e2e/rollouts/step_{step:06d}.parquet")
        validated = os.path.exists(f"{folder}/e2e/validation/step_{step - 1:06d}.parquet")
        if extra_info["split"] == "test" and before and validated:
            open(f"{folder}/validating-{step}", "w").close()
            while not os.path.exists(f"{folder}/go-on-{step}"):
                time.sleep(0.02)
            break
    return sum(map(ord, solution_str)) % 7 / 7
"""


def schedulers_of(run: Run) -> list[int]:
    """The processes of the engine that compute."""
    run._look()
    names = {}
    for pid, _ in list(run.seen):
        with suppress(psutil.Error):  # it has ended
            # of now: forks are renamed as they start
            names[pid] = " ".join(psutil.Process(pid).cmdline())
    found = [pid for pid, name in names.items() if "sglang" in name and "scheduler" in name]
    assert found, names
    return found


def kill(run: Run, folder: Path, victim: str) -> None:
    """The engine's first process that computes, or the worker that writes the log of this name."""
    os.kill(
        schedulers_of(run)[0]
        if victim == "engine"
        else pid_of(run, folder / "logs" / f"{victim}.log"),
        signal.SIGKILL,
    )


def run_and_kill(
    tmp_path: Path, settings: list[str], victims: Sequence[str], *shape: str
) -> list[str]:
    """The first victim dies while the engine generates, the second, if there is one, before the
    generation of the next step.

    Returns why engines were started again.
    """
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        *settings,
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        f"output_dir={tmp_path}",
        f"trainer.total_steps={STEPS}",
    ]
    words += [
        "rollout.n=2",
        f"reward.path={tmp_path / 'reward.py'}",
        f"+reward.kwargs.folder={tmp_path}",
        "sft.steps=1",
        *shape,
    ]
    words += ["trainer.test_every_steps=1", f"trainer.max_restarts={len(victims)}"]
    folder = tmp_path / "e2e"
    with Run(tmp_path / "output", "train", *words) as run:
        run.wait_for((tmp_path / "validating-1").exists)
        engine = schedulers_of(run)
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go-on-1").touch()
        run.wait_for((folder / "rollouts" / "step_000001.parquet").exists)
        time.sleep(2.0)  # the requests of the second step lie in an engine that stands still
        kill(run, folder, victims[0])
        for pid in engine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        run.wait_for((tmp_path / "validating-2").exists)
        for victim in victims[1:]:
            kill(run, folder, victim)
        (tmp_path / "go-on-2").touch()
        exit_code = run.end(300)
        left = run.left_behind()
    assert exit_code == 0, run.out + run.err
    assert left == []
    lost = len(victims)
    reasons = re.findall("restarting engines: (.*)", run.out)
    assert len(reasons) == lost, run.out
    records = list(read_jsonl(folder / "metrics.jsonl"))
    train = [record for record in records if record["phase"] == "train"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert [record["rollout/restarts"] for record in train] == [0, 1, lost, lost]
    assert {record["trainer/restarts"] for record in train} == {0}
    assert [record["step"] for record in records if record["phase"] == "val"] == list(
        range(STEPS + 1)
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["engine_restarts"], summary["restarts"], summary["steps"]) == (lost, 0, STEPS)
    # the new engine has the present weights
    assert summary["first_ppo_kl_max"] <= 1e-6 and summary["logprob_diff_mean"] <= 1e-4
    for step in range(1, STEPS + 1):
        rows = list(read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet"))
        assert len(rows) == SAMPLES and sorted(row["uid"] for row in rows) == sorted(
            [*range(4)] * 2
        )
        assert {row["weight_version"] for row in rows} == {str(step - 1)}
    return reasons


@pytest.mark.slow
def test_a_run_goes_on_when_its_only_engine_dies_while_it_generates(
    tmp_path: Path, settings: list[str]
) -> None:
    (reason,) = run_and_kill(tmp_path, settings, ["engine"])
    assert reason.startswith("no engine is left to serve requests: ")


@pytest.mark.slow
@pytest.mark.full
def test_a_run_goes_on_when_the_worker_beside_its_engine_dies_as_well(
    tmp_path: Path, settings: list[str]
) -> None:
    _, reason = run_and_kill(tmp_path, settings, ["engine", "rollout-rank0"])
    assert "the worker process died" in reason and "(rollout rank 0 " in reason


@pytest.mark.slow
@pytest.mark.full
def test_a_run_goes_on_when_the_worker_on_another_node_of_its_engine_dies(
    tmp_path: Path, settings: list[str]
) -> None:
    """Twice: while the engine generates, and before it is asked to."""
    reasons = run_and_kill(
        tmp_path,
        settings,
        ["rollout-node-rank0"] * 2,
        "rollout.tensor=2",
        "rollout.nodes_per_engine=2",
    )
    assert all(
        "the worker process died" in reason and "(rollout-node rank 0 " in reason
        for reason in reasons
    ), reasons
