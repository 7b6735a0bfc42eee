"""The death of any part ends the job, with its cause on the last line of the job's own output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.slurm.jobs import Jobs, left_behind, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.full]


def find(job: str, *texts: str) -> psutil.Process:
    """A process of the job with all of these texts in its command line: the oldest of them."""
    found = [psutil.Process(int(line.split()[0])) for line in processes_of(job)]
    fitting = [process for process in found if all(text in " ".join(process.cmdline()) for text in texts)]
    assert fitting, f"no process of job {job} with {texts}: {processes_of(job)}"
    return min(fitting, key=psutil.Process.create_time)


def rank_on_second_node(job: str) -> psutil.Process:
    """The child of n2's raylet that holds the most memory."""
    children = find(job, "raylet/raylet", "127.0.0.12").children()
    return max(children, key=lambda child: child.memory_info().rss)


def agent_of_second_node(job: str) -> psutil.Process:
    """The process that watches Ray on n2."""
    found = [psutil.Process(int(line.split()[0])) for line in processes_of(job) if "hybridflow.launch node" in line]
    return next(process for process in found if process.environ().get("SLURMD_NODENAME") == "n2")


def engine(job: str) -> psutil.Process:
    """The scheduler of the job's engine; its environment does not name the job, but it runs in the driver's folder."""
    folder = find(job, "hybridflow.cli.main train").cwd()
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if "sglang::scheduler" in " ".join(process.info["cmdline"] or []) and process.info["cwd"] == folder:
            return process
    raise AssertionError(f"no engine of job {job} runs in {folder}")


# Who is killed, and what the last line says.
VICTIMS: dict[str, tuple[Callable[[str], psutil.Process], str]] = {
    "rank": (rank_on_second_node, "on n2"),
    "engine": (engine, "engine"),
    "raylet": (lambda job: find(job, "raylet/raylet", "127.0.0.12"), "node n2: Ray ended"),
    "head": (lambda job: find(job, "gcs_server"), "node n1: Ray ended"),
    "agent": (agent_of_second_node, "node n2: the process that watches Ray ended (Killed)"),
    "driver": (lambda job: find(job, "hybridflow.cli.main train"), "the driver ended with status 137"),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_death_of_a_part_ends_the_job_with_its_cause_on_the_last_line(jobs: Jobs, victim: str) -> None:
    name = f"dead {victim}"
    job = jobs.submit(name, "trainer.max_restarts=0", "rollout.max_restarts=0", "--max-restarts", "0")
    jobs.in_loop(job, name)
    choose, cause = VICTIMS[victim]
    os.kill(choose(job).pid, signal.SIGKILL)
    assert jobs.end(job) == "FAILED"
    line = jobs.last_line(job)
    assert line.startswith(f"hybridflow: job {job}, start 0, failed: ") and cause in line, jobs.output(job)
    assert left_behind(job) == []
