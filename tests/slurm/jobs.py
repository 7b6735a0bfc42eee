"""Submit jobs as a user does, in a folder of their own, and look at what they leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hybridflow.observe.jsonl import read_jsonl
from tests.slurm.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
HYBRIDFLOW = (sys.executable, "-m", "hybridflow.cli.main")
# The smallest run over two nodes: two pipeline stages, one on each, and one engine.
TWO_NODES = (
    *("actor=tiny", "cluster.nodes=2", "cluster.procs_per_node=1", "actor.parallel.pipeline=2", "rollout=tiny"),
    *("rollout.n=2", "trainer.val_before_train=false", "data.val_files=[]", "trainer.export=false"),
)
SITE = """\
exclusive: false
object_store_gib: 0.1
limits: {min_free_gib: 1.0, min_shm_gib: 0.1, min_open_files: 1024, preflight_timeout_s: 60}
"""


class Jobs:
    """`hybridflow slurm` in a working folder whose name has spaces, on a cluster of ours."""

    def __init__(self, cluster: SlurmCluster, folder: Path, settings: list[str]) -> None:
        self.cluster, self.folder, self.settings = cluster, folder / "a folder", settings
        self.folder.mkdir(parents=True)
        (self.folder / "site.yaml").write_text(SITE)
        self.environment = {
            **cluster.environment,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HYBRIDFLOW_SITE": str(self.folder / "site.yaml"),
            "TMPDIR": "/tmp",
        }

    def run(self, *words: str, status: int = 0) -> str:
        """What `hybridflow slurm WORDS` prints, both streams; its exit status must be `status`."""
        done = subprocess.run(
            [*HYBRIDFLOW, "slurm", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def submit(self, name: str, *words: str) -> str:
        """The number of a new job; its run is called `name`."""
        said = self.run("submit", *words, *self.settings, *TWO_NODES, f"name={name}")
        found = re.search(r"submitted job (\d+)", said)
        assert found, said
        return found[1]

    def output(self, job: str) -> str:
        """The job's own output."""
        path = self.folder / "runs" / "slurm" / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_folder(self, job: str, restart: int = 0) -> Path:
        """The folder of one start of a job."""
        return self.folder / "runs" / "slurm" / job / f"restart-{restart}"

    def attempts(self, job: str) -> list[dict[str, Any]]:
        """How the starts of a job ended."""
        path = self.folder / "runs" / "slurm" / job / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, name: str) -> list[int]:
        """The steps that the run has recorded, in the file's order."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        return [record["step"] for record in read_jsonl(path) if record["phase"] == "train"] if path.exists() else []

    def end(self, job: str, timeout_s: float = 300.0) -> str:
        """Wait until Slurm is done with the job; returns the state that it ended in."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait_for(job, lambda: self.cluster.field(job, "JobState") in ended, timeout_s)
        return self.cluster.field(job, "JobState")

    def wait_for(self, job: str, what: Callable[[], object], timeout_s: float = 240.0) -> None:
        """Until `what()` holds; shows the job's output when it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s\n{self.logs(job)}"
            time.sleep(0.2)

    def logs(self, job: str) -> str:
        """Everything that the job wrote."""
        return self.run("logs", job)


def processes_of(job: str) -> list[str]:
    """Processes of a job that run: their environment has its number or token, or their command line names its Ray."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        try:
            environment = process.environ()
            ours = f"hf-job-{job}-" in words or environment.get("SLURM_JOB_ID") == job
            ours |= f"/slurm/{job}/restart-" in environment.get("RAY_AUTH_TOKEN_PATH", "")
        except psutil.Error:
            continue
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(f"{process.pid} {words[:100]}")
    return found


def left_behind(job: str, within_s: float = 20.0) -> list[str]:
    """Processes and temporary folders of a job that are there `within_s` seconds after its end."""
    deadline = time.monotonic() + within_s
    while True:
        left = [*processes_of(job), *map(str, Path("/tmp").glob(f"hf-job-{job}-*"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.3)
