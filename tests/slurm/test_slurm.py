"""Jobs on a real Slurm of two nodes: they run, end as designed whatever dies, and go on after a requeue."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.slurm.jobs import TWO_NODES, Jobs, left_behind, processes_of

pytestmark = pytest.mark.slow
STEPS = 30


def last_line(jobs: Jobs, job: str) -> str:
    """The last line of the job's own output."""
    return jobs.output(job).rstrip().splitlines()[-1]


def in_loop(jobs: Jobs, job: str, name: str, steps: int = 2, timeout_s: float = 240.0) -> None:
    """Wait until the run has recorded so many steps."""
    jobs.wait_for(job, lambda: len(jobs.steps(name)) >= steps, timeout_s)


def test_a_preempted_job_writes_a_checkpoint_is_requeued_and_goes_on(jobs: Jobs) -> None:
    name = "a preempted run"
    job = jobs.submit(name, "--partition", "low", f"trainer.total_steps={STEPS}", "--time", "30")
    in_loop(jobs, job, name)
    folder = jobs.start_folder(job)
    assert (folder / "token").stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0
    assert not [line for pid in processes_of(job) for line in _leaks(int(pid.split()[0]))]
    urgent = jobs.cluster.ask("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true")
    jobs.wait_for(job, lambda: jobs.attempts(job), 90)
    assert left_behind(job, 30) == []
    stopped = jobs.attempts(job)[0]
    assert stopped["outcome"] == "stopped" and stopped["next"] == "requeue", jobs.output(job)
    assert stopped["checkpoint"].startswith("global_step_")
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert jobs.cluster.field(urgent, "JobState") == "COMPLETED"
    assert jobs.steps(name) == list(range(1, STEPS + 1))
    assert f"resuming from runs/{name}/checkpoints/{stopped['checkpoint']}" in jobs.output(job)
    assert last_line(jobs, job) == f"hybridflow: job {job}, start 1, finished: finished"
    assert left_behind(job) == [] and not list(jobs.folder.rglob("token"))
    shown = jobs.run("logs", job)
    assert "0 node-n1 " in shown and "1 node-n2 " in shown and "1 driver " in shown


def _leaks(pid: int) -> list[str]:
    """Slurm's and PMI's variables in the environment of a Ray process or a driver."""
    try:
        process = psutil.Process(pid)
        words, environment = " ".join(process.cmdline()), process.environ()
    except psutil.Error:
        return []
    if "raylet" not in words and "hybridflow.cli" not in words and "ray::" not in words:
        return []
    return [f"{pid} {name}" for name in environment if name.startswith(("SLURM", "PMI", "PMIX"))]


@pytest.mark.parametrize("victim", ["worker", "raylet", "agent"])
@pytest.mark.full
def test_the_death_of_a_part_ends_the_job_with_its_cause_on_the_last_line(jobs: Jobs, victim: str) -> None:
    name = f"dead {victim}"
    words = (f"trainer.total_steps={STEPS * 10}", "trainer.max_restarts=0", "--max-restarts", "0")
    job = jobs.submit(name, *words)
    in_loop(jobs, job, name)
    if victim == "worker":
        os.kill(_worker_on_second_node(job), signal.SIGKILL)
    elif victim == "raylet":
        os.kill(_second(job, "raylet/raylet"), signal.SIGKILL)
    else:
        os.kill(_agent_of(job, "n2"), signal.SIGKILL)
    killed = time.monotonic()
    assert jobs.end(job, 120) == "FAILED"
    assert time.monotonic() - killed < 90
    line = last_line(jobs, job)
    assert line.startswith(f"hybridflow: job {job}, start 0, failed: "), jobs.output(job)
    assert "n2" in line, line
    assert left_behind(job, 30) == []


def _second(job: str, text: str) -> int:
    """The process with `text` in its command line that belongs to n2 (127.0.0.12)."""
    lines = [int(line.split()[0]) for line in processes_of(job) if text in line]
    return next(pid for pid in lines if any("127.0.0.12" in word for word in psutil.Process(pid).cmdline()))


def _worker_on_second_node(job: str) -> int:
    """A rank's process: a child of n2's raylet that has MASTER_ADDR or holds the most memory."""
    children = psutil.Process(_second(job, "raylet/raylet")).children()
    return max(children, key=lambda child: child.memory_info().rss).pid


def _agent_of(job: str, node: str) -> int:
    """The process that watches Ray on a node."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hybridflow.launch" in words and "node" in words:
            environment = process.environ()
            if environment.get("SLURM_JOB_ID") == job and environment.get("SLURMD_NODENAME") == node:
                return process.pid
    raise AssertionError(f"no agent of job {job} on {node}")


@pytest.mark.full
def test_a_node_whose_slurmd_died_gets_the_job_requeued_without_it(jobs: Jobs) -> None:
    name = "lost node"
    job = jobs.submit(name, f"trainer.total_steps={STEPS}", "trainer.save_every_steps=1", "--spares", "0")
    in_loop(jobs, job, name)
    jobs.cluster.kill_node("n2")
    jobs.wait_for(job, lambda: jobs.cluster.field(job, "Restarts") == "1", 180)
    jobs.cluster.start_node("n2")
    assert jobs.end(job, 400) == "COMPLETED", jobs.logs(job)
    assert jobs.steps(name) == list(range(1, STEPS + 1))
    assert left_behind(job, 30) == []


@pytest.mark.full
def test_a_job_at_its_time_limit_goes_on_in_the_next_start(jobs: Jobs) -> None:
    name = "time limit"
    job = jobs.submit(name, "trainer.total_steps=400", "--time", "4", "--grace", "60")
    jobs.wait_for(job, lambda: jobs.attempts(job), 400)
    assert jobs.attempts(job)[0]["next"] == "requeue", jobs.output(job)
    jobs.wait_for(job, lambda: jobs.cluster.field(job, "Restarts") == "1", 60)
    done = len(jobs.steps(name))
    jobs.wait_for(job, lambda: len(jobs.steps(name)) > done, 240)
    jobs.run("cancel", job)
    assert jobs.end(job) == "CANCELLED"
    steps = jobs.steps(name)
    assert steps == list(range(1, len(steps) + 1))
    assert left_behind(job, 40) == []


@pytest.mark.full
def test_two_jobs_at_once_do_not_meet_and_one_is_cancelled(jobs: Jobs) -> None:
    first = jobs.submit("one of two", "trainer.total_steps=400")
    second = jobs.submit("two of two", "trainer.total_steps=3")
    assert jobs.end(second, 400) == "COMPLETED", jobs.logs(second)
    in_loop(jobs, first, "one of two")
    jobs.run("cancel", first)
    assert jobs.end(first) == "CANCELLED"
    assert left_behind(first, 40) == left_behind(second, 10) == []
    assert "Requeue" not in jobs.run("status", first)


@pytest.mark.full
def test_a_job_that_fails_at_the_same_step_is_given_up(jobs: Jobs) -> None:
    (jobs.folder / "fails.py").write_text("def compute_score(*args):\n    raise ValueError('no score today')\n")
    words = ("--max-restarts", "9", f"reward.path={jobs.folder / 'fails.py'}")
    done = jobs.run("submit", *jobs.settings, "actor=tiny", "rollout=tiny", "cluster=one-process", "name=fails", *words)
    job = done.split()[2].rstrip(":")
    assert jobs.end(job, 500) == "FAILED"
    assert [attempt["next"] for attempt in jobs.attempts(job)] == ["requeue", "requeue", "give up"]
    assert "given up: 3 starts in a row ended at no checkpoint" in last_line(jobs, job)
    assert "no score today" in last_line(jobs, job)


@pytest.mark.full
def test_a_node_that_never_comes_up_is_named_with_its_remedy_within_the_deadline(jobs: Jobs) -> None:
    jobs.cluster.kill_node("n2")
    try:
        job = jobs.submit("no second node", "--max-restarts", "0")
        assert jobs.end(job, 120) == "FAILED", jobs.logs(job)
    finally:
        jobs.cluster.start_node("n2")
        jobs.cluster.wait_for(lambda: jobs.cluster.idle() == 2, 60, "both nodes are idle again")
    line = last_line(jobs, job)
    assert "preflight: 1 of 2 nodes are usable, 2 are needed n2: it did not answer (srun: error: Task launch" in line
    assert "sinfo -R" in line and left_behind(job) == []


def test_an_allocation_that_has_expired_ends_with_one_message(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(jobs.run("render", *jobs.settings, *TWO_NODES, "name=expired"))
    environment = {**jobs.environment, "SLURM_JOB_ID": "424242", "SLURM_JOB_NODELIST": "n[1-2]"}
    command = ["bash", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout
    line = done.stdout.rstrip().splitlines()[-1]
    assert "0 of 2 nodes are usable" in line and "srun: error: Unable to confirm allocation for job 424242" in line
    assert "UNKNOWN" in line


@pytest.mark.parametrize("nodes", ["n[1-2,4]", "rack1-[01-02],gpu7", "n1"])
def test_scontrol_reads_node_lists_with_gaps_and_several_prefixes(jobs: Jobs, nodes: str) -> None:
    script = Path(__file__).resolve().parents[2] / "launch" / "slurm" / "job.sh"
    lines = script.read_text().split("HOSTS=()\n")[1].split("STEP=")[0]
    environment = {**jobs.cluster.environment, "SLURM_JOB_NODELIST": nodes}
    command = ["bash", "-euc", f"HOSTS=()\n{lines}\nprintf '%s\\n' \"${{HOSTS[@]}}\""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = {"n[1-2,4]": "n1 n2 n4", "rack1-[01-02],gpu7": "rack1-01 rack1-02 gpu7", "n1": "n1"}[nodes]
    assert done.stdout.split() == expected.split()
