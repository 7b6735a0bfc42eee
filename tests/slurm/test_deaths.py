"""The death of any part ends the job, with its cause on the last line of the job's own output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.slurm.jobs import (
    Jobs,
    agent_of_second_node,
    engine_of,
    find,
    left_behind,
    rank_on,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


# Who is killed, and what the last line says.
VICTIMS: dict[str, tuple[Callable[[str], psutil.Process], str]] = {
    "rank": (lambda job: rank_on(job, "127.0.0.12"), "on n2"),
    "engine": (engine_of, "engine"),
    "raylet": (lambda job: find(job, "raylet/raylet", "127.0.0.12"), "node n2: Ray exited"),
    "head": (lambda job: find(job, "gcs_server"), "node n1: Ray exited"),
    "agent": (agent_of_second_node, "node n2: the process watching Ray exited (Killed)"),
    "driver": (
        lambda job: find(job, "hybridflow.cli.main sft"),
        "the driver exited with status 137",
    ),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_death_of_a_part_ends_the_job_with_its_cause_on_the_last_line(
    jobs: Jobs, victim: str
) -> None:
    name = f"dead {victim}"
    once = ("--max-restarts", "0")
    if victim == "engine":
        job = jobs.submit(name, "trainer.max_restarts=0", "rollout.max_restarts=0", *once)
    else:
        job = jobs.submit_sft(name, 2, *once)
    jobs.in_loop(job, name)
    choose, cause = VICTIMS[victim]
    os.kill(choose(job).pid, signal.SIGKILL)
    assert jobs.end(job) == "FAILED"
    line = jobs.last_line(job)
    assert line.startswith(f"hybridflow: job {job}, start 0, failed: ") and cause in line, (
        jobs.output(job)
    )
    assert left_behind(job) == []
