"""A node that is not in order ends the job with one message, which names it and a remedy."""

from __future__ import annotations

import shlex
import socket
from contextlib import ExitStack

import pytest

from hybridflow.errors import ResourceError
from hybridflow.launch.node import choose_ports
from tests.slurm.jobs import ON_N2, Jobs, left_behind, wrong_clock

pytestmark = [pytest.mark.slow, pytest.mark.full]


def refused(jobs: Jobs, job: str) -> str:
    """The last line of a job that could not start: why."""
    assert jobs.end(job) == "FAILED", jobs.logs(job)
    line = jobs.last_line(job)
    assert line.startswith(f"hybridflow: job {job}, start 0, failed: "), jobs.output(job)
    assert left_behind(job) == []
    return line


def test_a_clock_that_is_off_ends_the_job(jobs: Jobs) -> None:
    site = jobs.site("clock", python=wrong_clock(jobs))
    line = refused(jobs, jobs.submit("clock", "--site", site, "--max-restarts", "0"))
    assert (
        "preflight: 1 of 2 nodes are usable, but the job requires 2 n2: problem with n1: the clock "
        "of n2 is +"
    ) in line
    assert line.endswith("start chrony or ntpd there")


def test_a_folder_that_the_nodes_do_not_share_ends_the_job(jobs: Jobs) -> None:
    elsewhere = ON_N2.format(step="preflight", lines='set -- "${@/restart-0/elsewhere}"')
    site = jobs.site("not shared", python=elsewhere, preflight_timeout_s=90)
    line = refused(jobs, jobs.submit("not shared", "--site", site, "--max-restarts", "0"))
    assert "preflight: 1 of 2 nodes are usable, but the job requires 2 n2: " in line
    assert line.endswith("does not exist on that node; choose an output_dir that all nodes mount")


def test_a_token_that_does_not_match_ends_the_job(jobs: Jobs) -> None:
    token = jobs.folder / "other-token"
    token.touch(0o600)
    token.write_text("1" * 64)
    lines = f"export RAY_AUTH_TOKEN_PATH={shlex.quote(str(token))}"
    site = jobs.site("token", python=ON_N2.format(step="node", lines=lines))
    line = refused(jobs, jobs.submit("token", "--site", site, "--max-restarts", "0"))
    assert "n2" in line and "token" in line


def test_a_node_whose_ports_are_taken_ends_the_job(jobs: Jobs) -> None:
    site, go = jobs.gate("ports")
    job = jobs.submit("ports", "--site", site, "--max-restarts", "0")
    with ExitStack() as taken:
        with pytest.raises(ResourceError):
            while True:
                port = choose_ports(int(job), 1, "127.0.0.12")["node-manager-port"]
                taken.enter_context(socket.create_server(("127.0.0.12", port)))
        go.touch()
        line = refused(jobs, job)
    assert "node n2: no free ports for Ray on 127.0.0.12" in line and line.endswith(
        "see `ss -ltnp`"
    )


def test_a_node_that_never_comes_up_ends_the_job(jobs: Jobs) -> None:
    site, go = jobs.gate("no second node")
    job = jobs.submit("no second node", "--site", site, "--max-restarts", "0")
    jobs.wait_for(job, lambda: jobs.cluster.field(job, "JobState") == "RUNNING")
    jobs.cluster.kill_node("n2")
    try:
        go.touch()
        jobs.wait_for(job, lambda: f"hybridflow: job {job}, start 0, " in jobs.output(job))
    finally:
        # without it Slurm would not call the job ended for SlurmdTimeout
        jobs.cluster.start_node("n2")
        jobs.cluster.wait_until_idle()
    line = refused(jobs, job)
    assert (
        "preflight: 1 of 2 nodes are usable, but the job requires 2 n2: it did not answer (srun: "
        "error: "
        "Task launch"
    ) in line
    assert "sinfo -R" in line
