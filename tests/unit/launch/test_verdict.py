"""Why a job ended and what happens next, from the files that its parts leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.errors import WorkerError
from hybridflow.launch import records
from hybridflow.launch.verdict import STOPPED, judge, read_attempts


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder with one start on n1 (10.0.0.1) and n2."""
    use = [{"node": "n1", "address": "10.0.0.1"}, {"node": "n2", "address": "10.0.0.2"}]
    records.write(tmp_path / "restart-0" / records.CHOSEN, {"use": use})
    return tmp_path


def save(job: Path, folder: str) -> Path:
    """The run's folder with this checkpoint in force."""
    records.write(job / "run" / "checkpoints" / "latest.json", {"folder": folder})
    return job / "run"


def test_a_dead_worker_is_named_with_role_rank_node_and_the_last_line_of_its_log(job: Path) -> None:
    error = WorkerError(
        "died",
        role="actor",
        rank=1,
        node="10.0.0.2",
        method="update_policy",
        log_tail="x\nCUDA error\n",
    )
    (job / "restart-0" / "driver.log").write_text(f"GRPO 1/9\nhybridflow: {error}\n")
    attempt, log_tail, code = judge(job, 0, 0, job / "run", 1)
    assert (
        attempt.why.startswith("died (actor rank 1 on n2, in update_policy): CUDA error")
        and code == 1
    )
    assert attempt.next == "give up" and "CUDA error" in log_tail


def test_a_node_that_failed_first_is_the_cause_and_not_what_the_driver_made_of_it(
    job: Path,
) -> None:
    for node, at in (("n1", 2.0), ("n2", 1.0)):
        told = {
            "node": node,
            "what": "Ray exited with status 1",
            "tail": f"raylet of {node} died",
            "time": at,
        }
        records.write(job / "restart-0" / records.FAILED.format(node), told)
    (job / "restart-0" / "driver.log").write_text("hybridflow: Ray is lost\n")
    attempt, _, _ = judge(job, 0, 0, job / "run", 1)
    assert attempt.why == "node n2: Ray exited with status 1: raylet of n2 died"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: n2: task 1: Killed", "node n2: the process watching Ray exited (Killed)"),
        ("srun: error: Node failure on n2", "Node failure on n2"),
        (
            (
                "srun: error: Task launch for StepId=7.2 failed on node n2: Communication "
                "connection failure"
            ),
            "Task launch for StepId=7.2 failed on node n2: Communication connection failure",
        ),
    ],
)
def test_a_killed_agent_and_a_lost_node_are_read_from_srun(
    job: Path, line: str, expected: str
) -> None:
    (job / "restart-0" / "ray.err").write_text(f"srun: launching\n{line}\n")
    assert judge(job, 0, 0, job / "run", None)[0].why == expected


def test_a_driver_that_dies_without_a_message_shows_its_last_lines(job: Path) -> None:
    (job / "restart-0" / "driver.log").write_text("Traceback\nValueError: odd\n")
    attempt, log_tail, code = judge(job, 0, 0, job / "run", 134)
    assert (
        attempt.why.endswith("status 134 without a message: ValueError: odd")
        and code == 134
        and log_tail
    )


def test_stopping_on_request_requeues_and_is_no_failure(job: Path) -> None:
    for restart in range(5):
        run = save(job, f"global_step_{restart}")
        attempt, _, code = judge(job, restart, 0, run, STOPPED, asked=True)
        assert (attempt.outcome, attempt.next, code) == ("stopped", "requeue", STOPPED)
    assert [attempt.restart for attempt in read_attempts(job)] == [0, 1, 2, 3, 4]


def test_failures_are_limited_and_the_same_step_three_times_gives_up(job: Path) -> None:
    codes = [judge(job, number, 2, save(job, f"global_step_{number}"), 1)[2] for number in range(3)]
    assert codes == [STOPPED, STOPPED, 1]
    assert "all 2 restarts were used" in read_attempts(job)[-1].why
    other = job / "other"
    said = [judge(other, number, 99, save(job, "global_step_7"), 1) for number in range(3)]
    assert [code for _, _, code in said] == [STOPPED, STOPPED, 1]
    assert "3 starts in a row ended at global_step_7" in said[-1][0].why


def test_a_refused_configuration_and_a_cancelled_job_are_not_requeued(job: Path) -> None:
    (job / "restart-0" / "driver.log").write_text("hybridflow: unknown key actr\n")
    attempt, _, code = judge(job, 0, 9, job / "run", 2)
    assert (attempt.why, attempt.next, code) == ("unknown key actr", "give up", 2)
    attempt, _, code = judge(job, 0, 9, job / "run", STOPPED, asked=True, state="COMPLETING")
    assert attempt.next == "left to Slurm" and "COMPLETING" in attempt.why and code != STOPPED


def test_a_finished_job_is_done(job: Path) -> None:
    assert judge(job, 0, 3, job / "run", 0)[0].next == "done"
    # Slurm did not answer
    assert judge(job, 0, 3, job / "run", 0, state="UNKNOWN")[0].next == "done"


def test_a_job_that_slurm_does_not_know_is_not_requeued(job: Path) -> None:
    attempt, _, code = judge(job, 0, 3, job / "run", None, state="UNKNOWN", why="no node answered")
    assert (
        attempt.next == "left to Slurm"
        and attempt.why.endswith("the job's state to UNKNOWN")
        and code == 1
    )


def test_a_start_that_slurm_has_requeued_has_not_finished(job: Path) -> None:
    """srun ends with 0 when Slurm has lost the node of its step, whose processes run on."""
    attempt, _, code = judge(job, 0, 3, job / "run", 0, state="REQUEUED")
    assert (
        (attempt.outcome, attempt.next) == ("failed", "left to Slurm")
        and "REQUEUED" in attempt.why
        and code
    )


def test_records_that_are_torn_count_as_absent(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ')
    assert (
        records.read(tmp_path / "x.json") is None and records.read(tmp_path / "none.json") is None
    )
    assert records.tail(tmp_path / "none.log") == ""
