"""A suite as a job: every node measures at the same time, and the report names the node that is
slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.full]

# Node n2 syncs each file to disk slowly: Python itself loads this file in every process, and no
# code of ours knows it.
SLOW = """
import os
if os.environ.get("SLURMD_NODENAME") == "n2":
    import time
    _fsync = os.fsync
    def slow(descriptor):
        _fsync(descriptor)
        time.sleep(1.0)
    os.fsync = slow
"""


def test_a_suite_runs_as_a_job_and_the_report_names_the_slow_node(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    jobs = Jobs(slurm, tmp_path, [])
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    jobs.environment["PYTHONPATH"] = f"{tmp_path / 'slow'}:{jobs.environment['PYTHONPATH']}"
    said = jobs.run("submit", "--bench", "preflight", "--nodes", "3")
    job = said.split("submitted job ")[1].split(":")[0]
    path = jobs.folder / "runs" / "bench" / "slurm"
    state = jobs.end(job)
    output = (path / f"{job}.out").read_text()
    assert sorted(file.stem for file in (path / job / "nodes").glob("*.json")) == [
        "n1",
        "n2",
        "n3",
    ], output
    assert "node n2 stands out: local disk/write" in output and state == "FAILED"
    assert "node n2 stands out" in (path / job / "report.html").read_text()
    found = json.loads((path / job / "nodes" / "n2.json").read_text())
    assert found["fingerprint"]["placement"]["nodes"] == ["n1", "n2", "n3"]
    assert {"links/to neighbour 1", "links/to neighbour 2"} <= {
        metric["name"] for metric in found["metrics"]
    }
