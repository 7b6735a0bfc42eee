"""Jobs on a real Slurm: they run, stop with a checkpoint when Slurm wants the nodes, go on after a
requeue, and are cancelled."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.slurm.jobs import (
    ENDLESS,
    HYBRIDFLOW,
    TWO_NODES,
    Jobs,
    left_behind,
    processes_of,
    rank_on,
    wrong_clock,
)

pytestmark = pytest.mark.slow


def urgent_job(jobs: Jobs, released: Path) -> str:
    """A job that takes all nodes from those of lower partitions, and keeps them until the file
    `released` is there."""
    wait = f"until [ -e {shlex.quote(str(released))} ]; do sleep 0.2; done"  # sbatch gives it to sh
    nodes = f"--nodes={len(jobs.cluster.names)}"
    return jobs.cluster.ask(
        "sbatch",
        "--parsable",
        "--partition=high",
        nodes,
        "--exclusive",
        "--output=/dev/null",
        f"--wrap={wait}",
    )


def test_a_spare_takes_the_place_of_a_bad_node_and_another_job_shares_the_others(
    jobs: Jobs,
) -> None:
    """Without engines: tests/walks/test_cluster_user.py has a recipe over two nodes. The second job
    is an array with a dependency, and its environment is unpacked onto the node's own disk."""
    name = "two steps"
    site = jobs.site("spare", python=wrong_clock(jobs))
    job = jobs.submit_sft(name, 2, "--site", site, "--spares", "1", "sft.steps=2")
    array = ("--array", "3-3", "sft.steps=%a", "--dependency", f"after:{job}")
    other = jobs.submit_sft("task %a", 1, "--site", jobs.site_with_archive("unpacked"), *array)
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert "excluding n2: problem with n" in jobs.output(job) and jobs.steps(name) == [1, 2]
    last = jobs.attempts(job)[-1]["restart"]  # a start may have failed on a busy machine
    assert (jobs.start_folder(job, last) / "nodes.txt").read_text().split() == ["n1", "n3"]
    assert jobs.last_line(job) == f"hybridflow: job {job}, start {last}, finished: finished"
    assert left_behind(job) == [] and not list(jobs.start_folder(job, last).rglob("token"))
    shown = jobs.logs(job)
    assert (
        f"{last} node-n1 " in shown and f"{last} node-n3 " in shown and f"{last} driver " in shown
    )
    assert jobs.end(other) == "COMPLETED", jobs.logs(other)
    assert jobs.steps("task 3") == [1, 2, 3]
    assert "0 driver " in jobs.run("logs", f"{other}_3") and "finished" in jobs.run(
        "status", f"{other}_3"
    )
    assert left_behind(other) == []


def test_a_job_goes_on_whatever_takes_its_nodes_or_its_processes(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Preempted with a time of grace, a node's slurmd killed, at last a process of the run."""
    name = "taken"
    released = tmp_path / "released"
    job = jobs.submit_sft(name, 2, "--partition", "low", "--time", "60")
    jobs.in_loop(job, name)
    folder = jobs.start_folder(job, jobs.restarts(job))
    assert (folder / "token").stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0
    assert not [line for pid in processes_of(job) for line in _leaks(int(pid.split()[0]))]

    earlier = len(jobs.attempts(job))
    urgent_job(jobs, released)
    jobs.wait_for(job, lambda: len(jobs.attempts(job)) > earlier)
    stopped = jobs.attempts(job)[earlier]
    assert stopped["outcome"] == "stopped" and stopped["next"] == "requeue", jobs.output(job)
    jobs.wait_for(job, lambda: jobs.cluster.field(job, "JobState") == "PENDING")
    assert left_behind(job) == []
    jobs.cluster.ask("scontrol", "update", f"JobId={job}", "Partition=debug")
    released.touch()
    goes_on(jobs, job, name, stopped["checkpoint"])

    started = jobs.restarts(job)
    jobs.cluster.lose_node("n2")
    try:
        jobs.wait_for(job, lambda: jobs.restarts(job) > started)
        goes_on(jobs, job, name)
        assert jobs.cluster.field(job, "NodeList") == "n[1,3]"
    finally:
        jobs.cluster.start_node("n2")
        jobs.cluster.wait_until_up("n2")

    earlier = len(jobs.attempts(job))
    os.kill(rank_on(job, "127.0.0.13").pid, signal.SIGKILL)
    jobs.wait_for(job, lambda: len(jobs.attempts(job)) > earlier)
    killed = jobs.attempts(job)[earlier]
    assert killed["next"] == "requeue" and "(actor rank 1 on n3" in killed["why"], jobs.output(job)
    jobs.run("cancel", job)
    assert jobs.end(job) == "CANCELLED"
    steps = jobs.steps(name)
    assert steps == list(range(1, len(steps) + 1))
    assert left_behind(job) == []


def goes_on(jobs: Jobs, job: str, name: str, checkpoint: str = "") -> None:
    """Wait until the job's present start has taken steps after the checkpoint that it resumed
    from."""
    start = jobs.restarts(job)
    log = jobs.start_folder(job, start) / "driver.log"
    jobs.wait_for(job, lambda: log.exists() and "resuming from " in log.read_text())
    resumed = re.search(rf"resuming from runs/{name}/checkpoints/(\w+)", log.read_text())
    assert resumed and resumed[1] == (checkpoint or resumed[1]), log.read_text()
    jobs.in_loop(job, name, int(resumed[1].rpartition("_")[2]) + 2)


@pytest.mark.full
def test_a_preempted_job_writes_a_checkpoint_is_requeued_and_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    name = "a preempted run"
    released = tmp_path / "released"
    job = jobs.submit(
        name, "--partition", "low", *jobs.recipe("preempted", ENDLESS), "--time", "60"
    )
    jobs.in_loop(job, name)
    earlier = len(jobs.attempts(job))  # a start may have failed on a busy machine
    folder = jobs.start_folder(job, earlier)
    assert (folder / "token").stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0
    assert not [line for pid in processes_of(job) for line in _leaks(int(pid.split()[0]))]
    urgent = urgent_job(jobs, released)
    jobs.wait_for(job, lambda: len(jobs.attempts(job)) > earlier)
    assert left_behind(job) == []
    stopped = jobs.attempts(job)[earlier]
    assert stopped["outcome"] == "stopped" and stopped["next"] == "requeue", jobs.output(job)
    done = int(stopped["checkpoint"].removeprefix("global_step_"))
    jobs.recipe("preempted", done + 2)
    released.touch()
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert jobs.cluster.field(urgent, "JobState") == "COMPLETED"
    assert jobs.steps(name) == list(range(1, done + 3))
    assert f"resuming from runs/{name}/checkpoints/{stopped['checkpoint']}" in jobs.output(job)
    assert jobs.last_line(job) == f"hybridflow: job {job}, start {earlier + 1}, finished: finished"
    assert left_behind(job) == [] and not list(jobs.folder.rglob("token"))
    shown = jobs.run("logs", job)
    assert (
        f"{earlier} node-n1 " in shown
        and f"{earlier + 1} node-n2 " in shown
        and f"{earlier + 1} driver " in shown
    )


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


@pytest.mark.full
def test_a_job_preempted_without_grace_goes_on_from_the_last_checkpoint(
    jobs: Jobs, tmp_path: Path
) -> None:
    name = "no grace"
    released = tmp_path / "released"
    words = ("trainer.save_every_steps=1", "--time", "60")
    job = jobs.submit(name, "--partition", "abrupt", *jobs.recipe("abrupt", ENDLESS), *words)
    jobs.in_loop(job, name, 3)
    started = jobs.restarts(job)
    urgent_job(jobs, released)
    jobs.wait_for(job, lambda: jobs.restarts(job) > started)
    assert left_behind(job) == []
    done = len(jobs.steps(name))
    jobs.recipe("abrupt", done + 2)
    released.touch()
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert "resuming from " in jobs.output(job) and jobs.steps(name) == list(range(1, done + 3))
    assert "give up" not in [attempt["next"] for attempt in jobs.attempts(job)]
    assert left_behind(job) == []


@pytest.mark.full
def test_a_node_whose_slurmd_died_gets_the_job_requeued_without_it(jobs: Jobs) -> None:
    name = "lost node"
    job = jobs.submit(name, *jobs.recipe("lost", ENDLESS), "trainer.save_every_steps=1")
    jobs.in_loop(job, name)
    started = jobs.restarts(job)
    jobs.cluster.lose_node("n2")
    try:
        jobs.wait_for(job, lambda: jobs.restarts(job) > started)
        done = len(jobs.steps(name))
        jobs.recipe("lost", done + 2)
        assert jobs.end(job) == "COMPLETED", jobs.logs(job)
        assert jobs.cluster.field(job, "NodeList") == "n[1,3]"
    finally:
        jobs.cluster.start_node("n2")
        jobs.cluster.wait_until_idle()
    assert jobs.steps(name) == list(range(1, done + 3))
    assert left_behind(job) == []


@pytest.mark.full
def test_a_start_on_a_node_that_slurm_has_lost_ends_when_the_job_starts_elsewhere(
    jobs: Jobs,
) -> None:
    name = "lost start"
    job = jobs.submit_sft(name, 1)
    jobs.in_loop(job, name)
    node = jobs.cluster.field(job, "NodeList")
    earlier = len(jobs.attempts(job))
    started = jobs.restarts(job)
    jobs.cluster.lose_node(node)  # its processes run on
    try:
        jobs.wait_for(job, lambda: len(jobs.attempts(job)) > earlier)
        lost = jobs.attempts(job)[earlier]
        assert (lost["restart"], lost["next"]) == (started, "left to Slurm"), jobs.output(job)
        jobs.wait_for(job, lambda: jobs.restarts(job) > started)
        goes_on(jobs, job, name)
        assert jobs.cluster.field(job, "NodeList") != node
        jobs.run("cancel", job)
        assert jobs.end(job) == "CANCELLED"
        assert left_behind(job) == []
    finally:
        jobs.cluster.start_node(node)
        jobs.cluster.wait_until_up(node)
    steps = jobs.steps(name)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.full
def test_a_job_at_its_time_limit_goes_on_in_the_next_start(jobs: Jobs) -> None:
    name = "its time limit"
    job = jobs.submit(name, "--time", "120", "--grace", "60")
    jobs.in_loop(job, name)
    hours, minutes, _ = map(int, jobs.cluster.field(job, "RunTime").split(":"))
    earlier = len(jobs.attempts(job))
    jobs.cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 3}")
    jobs.wait_for(job, lambda: len(jobs.attempts(job)) > earlier)
    jobs.cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=120")
    stopped = jobs.attempts(job)[earlier]
    assert stopped["outcome"] == "stopped" and stopped["next"] == "requeue", jobs.output(job)
    done = int(stopped["checkpoint"].removeprefix("global_step_"))
    jobs.in_loop(job, name, done + 1)
    assert f"resuming from runs/{name}/checkpoints/{stopped['checkpoint']}" in jobs.output(job)
    jobs.run("cancel", job)
    assert jobs.end(job) == "CANCELLED"
    steps = jobs.steps(name)
    assert steps == list(range(1, len(steps) + 1))
    assert left_behind(job) == []


@pytest.mark.full
def test_two_jobs_at_once_do_not_meet_and_one_is_cancelled(jobs: Jobs) -> None:
    first = jobs.submit("one of two")
    second = jobs.submit("two of two", *jobs.recipe("short", 3))
    assert jobs.end(second) == "COMPLETED", jobs.logs(second)
    jobs.in_loop(first, "one of two")
    jobs.run("cancel", first)
    assert jobs.end(first) == "CANCELLED"
    assert left_behind(first) == left_behind(second) == []
    assert "Requeue" not in jobs.run("status", first)


@pytest.mark.full
def test_a_job_that_fails_at_the_same_step_is_given_up(jobs: Jobs) -> None:
    """The first update of a run with such a rate is finite, the second one is not."""
    job = jobs.submit_sft(
        "fails", 1, "--max-restarts", "9", "sft.optim.lr=1e30", "actor.on_nonfinite=stop"
    )
    assert jobs.end(job) == "FAILED"
    assert [attempt["next"] for attempt in jobs.attempts(job)] == ["requeue", "requeue", "give up"]
    assert "gave up: 3 starts in a row ended at sft_step_1" in jobs.last_line(job)
    assert "is not finite: rank 0 micro-batch 0" in jobs.last_line(job)


def test_an_allocation_that_has_expired_ends_with_one_message(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(
        jobs.run("render", "--config-name", "e2e", *jobs.settings, *TWO_NODES, "name=expired")
    )
    environment = {**jobs.environment, "SLURM_JOB_ID": "424242", "SLURM_JOB_NODELIST": "n[1-2]"}
    command = ["bash", str(script)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stdout
    line = done.stdout.rstrip().splitlines()[-1]
    assert (
        "0 of 2 nodes are usable" in line
        and "srun: error: Unable to confirm allocation for job 424242" in line
    )
    assert "UNKNOWN" in line


def test_doctor_looks_at_every_node_of_an_allocation(jobs: Jobs) -> None:
    command = ["salloc", "--nodes=2", "--ntasks-per-node=1", *HYBRIDFLOW, "doctor", "--nodes"]
    done = subprocess.run(
        command,
        cwd=jobs.folder,
        env=jobs.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "n1:" in done.stdout and "n2:" in done.stdout, done.stderr
    assert done.stdout.count("error(s), ") == 2
    assert done.returncode == (0 if done.stdout.count("0 error(s), ") == 2 else 1)


@pytest.mark.full
def test_a_heterogeneous_job_is_one_cluster(jobs: Jobs) -> None:
    name = "two parts"
    words = (
        "--nodes",
        "2",
        "--other-nodes",
        "1",
        "--other-sbatch=--comment=rollout",
        "sft.steps=2",
    )
    job = jobs.submit_sft(name, 2, *words)
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    assert jobs.steps(name) == [1, 2] and left_behind(job) == []
    assert len((jobs.start_folder(job) / "nodes.txt").read_text().split()) == 2


@pytest.mark.parametrize("nodes", ["n[1-2,4]", "rack1-[01-02],gpu7", "n1"])
def test_scontrol_reads_node_lists_with_gaps_and_several_prefixes(jobs: Jobs, nodes: str) -> None:
    script = Path(__file__).resolve().parents[2] / "launch" / "slurm" / "job.sh"
    lines = script.read_text().split("HOSTS=()\n")[1].split("STEP=")[0]
    environment = {**jobs.cluster.environment, "SLURM_JOB_NODELIST": nodes}
    command = ["bash", "-euc", f"HOSTS=()\n{lines}\nprintf '%s\\n' \"${{HOSTS[@]}}\""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = {"n[1-2,4]": "n1 n2 n4", "rack1-[01-02],gpu7": "rack1-01 rack1-02 gpu7", "n1": "n1"}[
        nodes
    ]
    assert done.stdout.split() == expected.split()
