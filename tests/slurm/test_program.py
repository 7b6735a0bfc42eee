"""A program with `hybridflow.Run(where="slurm")`: it submits itself, trains in the job over two
nodes, and is stopped and started again as a recipe is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.slurm.jobs import ENDLESS, TWO_NODES, Jobs, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.full]
PROGRAM = """
import sys

import hybridflow as hf
from beside import BONUS


def score(data_source, solution_str, ground_truth, extra_info):
    return BONUS + float(ground_truth in solution_str)


with hf.Run(
    *sys.argv[2:],
    recipe="e2e",
    reward=score,
    where="slurm",
    slurm={"max_restarts": 1},
    trainer={"total_steps": int(sys.argv[1]), "save_every_steps": 1},
) as run:
    for metrics in run.steps():
        print("step", metrics["step"], "score", metrics["critic/score/mean"], flush=True)
print("the program has ended")
"""


def submitted(jobs: Jobs, name: str, steps: int) -> str:
    """The number of the job that the program submits; the reward is the program's."""
    given = [word for word in jobs.settings if not word.startswith("reward.")]
    done = subprocess.run(
        [sys.executable, "mine.py", str(steps), *given, *TWO_NODES, f"name={name}"],
        cwd=jobs.folder,
        env=jobs.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the program has ended" not in done.stdout
    number = re.search(r"submitted job (\d+)", done.stdout)
    assert number, done.stdout
    return number[1]


def test_a_program_submits_itself_and_goes_on_from_its_checkpoint(jobs: Jobs) -> None:
    (jobs.folder / "mine.py").write_text(PROGRAM)
    (jobs.folder / "beside.py").write_text("BONUS = 1.0\n")
    job = submitted(jobs, "program", 2)
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert jobs.steps("program") == [1, 2]
    output = jobs.output(job)
    assert re.search(r"step 2 score 1\.", output) and "the program has ended" in output
    assert left_behind(job) == []

    # another job of the same program resumes the run; one that is asked to stop is requeued
    job = submitted(jobs, "program", ENDLESS)
    jobs.wait_for(job, lambda: len(jobs.steps("program")) > 3)
    jobs.cluster.ask("scancel", "--signal=USR1", "--batch", job)
    jobs.wait_for(job, lambda: jobs.attempts(job))
    assert jobs.attempts(job)[0]["outcome"] == "stopped", jobs.logs(job)
    done = len(jobs.steps("program"))
    jobs.wait_for(job, lambda: len(jobs.steps("program")) > done)
    assert jobs.restarts(job) == 1
    jobs.cluster.ask("scancel", job)
    jobs.end(job)
    assert jobs.steps("program") == list(range(1, len(jobs.steps("program")) + 1))
    assert left_behind(job) == []
