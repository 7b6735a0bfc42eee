"""Submit jobs as a user does, in a folder of their own, and look at what they leave."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hybridflow.observe.jsonl import read_jsonl
from tests.slurm.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
HYBRIDFLOW = (sys.executable, "-m", "hybridflow.cli.main")
# Long deadlines: several jobs and their daemons share this machine.
PATIENT = ("cluster.start_timeout_s=600", "rollout.start_timeout_s=600")
# The smallest run over two nodes: two pipeline stages, one on each, and one engine.
TWO_NODES = (
    *(
        "actor=tiny",
        "cluster.nodes=2",
        "cluster.procs_per_node=1",
        "actor.parallel.pipeline=2",
        "rollout=tiny",
    ),
    *(
        "rollout.n=2",
        "trainer.val_before_train=false",
        "data.val_files=[]",
        "trainer.export=false",
        *PATIENT,
    ),
)
SITE: dict[str, Any] = {
    "exclusive": False,
    "object_store_gib": 0.1,
    "limits": {
        **{"min_free_gib": 1.0, "min_shm_gib": 0.1, "min_open_files": 1024},
        **{"preflight_timeout_s": 240, "start_timeout_s": 600},
    },
}
# Shell lines before a Python of node n2 that does STEP.
ON_N2 = "if [[ ${{SLURMD_NODENAME:-}} == n2 && ${{4:-}} == {step} ]]; then {lines}; fi"
CLOCK = """
import time
_time = time.time
time.time = lambda: _time() + 60.0
"""
ENDLESS = 100_000  # steps: such a run ends only when something ends it


class Jobs:
    """`hybridflow slurm` in a working folder whose name has spaces, on a cluster of ours."""

    def __init__(self, cluster: SlurmCluster, folder: Path, settings: list[str]) -> None:
        self.cluster = cluster
        self.folder = folder / "a folder"
        self.settings = settings
        self.folder.mkdir(parents=True)
        (self.folder / "recipes").mkdir()
        self.environment = {
            **cluster.environment,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HYBRIDFLOW_SITE": str(self.site("plain")),
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
            timeout=300,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def site(
        self, name: str, prolog: str = "", python: str = "", preflight_timeout_s: int = 240
    ) -> Path:
        """A site file. `prolog` is a shell line before the job's own; `python` are lines before
        each of its Pythons."""
        values = {**SITE, "limits": {**SITE["limits"], "preflight_timeout_s": preflight_timeout_s}}
        values["prolog"] = [prolog] if prolog else []
        if python:
            program = self.folder / f"python {name}"
            program.write_text(f'#!/bin/bash\n{python}\nexec {shlex.quote(sys.executable)} "$@"\n')
            program.chmod(0o755)
            values["environment"] = {"python": str(program)}
        path = self.folder / f"site-{name}.yaml"
        path.write_text(json.dumps(values))
        return path

    def site_with_archive(self, name: str) -> Path:
        """A site file whose jobs unpack their environment onto the node's own disk: a program that
        runs this Python."""
        archive = self.folder / f"{name}.tar"
        local = self.folder / f"{name} on a node"
        python = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n'.encode()
        with tarfile.open(archive, "w") as file:
            entry = tarfile.TarInfo("bin/python")
            entry.size = len(python)
            entry.mode = 0o755
            file.addfile(entry, io.BytesIO(python))
        environment = {
            "archive": str(archive),
            "local": str(local),
            "python": str(local / "bin" / "python"),
        }
        path = self.folder / f"site-{name}.yaml"
        path.write_text(json.dumps({**SITE, "environment": environment}))
        return path

    def gate(self, name: str) -> tuple[Path, Path]:
        """A site file whose jobs wait, before anything else, for a file; and that file."""
        file = self.folder / f"go-{name}"
        return self.site(
            name, prolog=f"until [[ -e {shlex.quote(str(file))} ]]; do sleep 0.2; done"
        ), file

    def recipe(self, name: str, steps: int) -> list[str]:
        """Words for `submit`: the e2e recipe with so many steps. To write it again changes the
        job's next start."""
        path = self.folder / "recipes" / f"{name}.yaml"
        path.with_suffix(".new").write_text(
            f"defaults: [e2e, _self_]\ntrainer: {{total_steps: {steps}}}\n"
        )
        path.with_suffix(".new").replace(path)
        return ["--config-dir", str(path.parent), "--config-name", name]

    def submit(self, name: str, *words: str | Path) -> str:
        """The number of a new job; its run is called `name`. It is endless unless `words` name a
        recipe or steps."""
        self._check_new(name)
        words = tuple(map(str, words))
        chosen = (
            ()
            if "--config-name" in words
            else ("--config-name", "e2e", f"trainer.total_steps={ENDLESS}")
        )
        said = self.run("submit", *chosen, *self.settings, *TWO_NODES, f"name={name}", *words)
        return _number(said)

    def submit_sft(self, name: str, nodes: int, *words: str | Path) -> str:
        """The number of a new job of supervised fine-tuning, a rank on each node, without engines:
        it starts sooner. Endless unless `words` have `sft.steps`; each step is saved."""
        self._check_new(name)
        chosen = ["--job", "sft", "--config-name", "e2e", f"name={name}"]
        chosen += (
            []
            if any(str(word).startswith("sft.steps=") for word in words)
            else [f"sft.steps={ENDLESS}"]
        )
        shape = (
            "actor=tiny",
            f"cluster.nodes={nodes}",
            "cluster.procs_per_node=1",
            f"actor.parallel.pipeline={nodes}",
        )
        settings = [word for word in self.settings if word.startswith("data.")]
        said = self.run(
            *(
                "submit",
                *chosen,
                *settings,
                *shape,
                *PATIENT,
                "trainer.save_every_steps=1",
                "trainer.export=false",
            ),
            "trainer.max_restarts=0",
            *map(str, words),
        )
        return _number(said)

    def submit_recipe(self, recipe: str, *words: str) -> str:
        """The number of a new job of a shipped recipe, whose run has its name."""
        self._check_new(recipe)
        return _number(self.run("submit", "--config-name", recipe, *words))

    def _check_new(self, name: str) -> None:
        """The tests share a folder: a second job of the same name would resume the first one's
        run."""
        assert not (self.folder / "runs" / name).exists(), f"another test has a run called {name!r}"

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

    def restarts(self, job: str) -> int:
        """How often Slurm has started the job again."""
        return int(self.cluster.field(job, "Restarts"))

    def steps(self, name: str) -> list[int]:
        """The steps that the run has recorded, in the file's order, of either kind of job."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        phases = ("train", "sft")
        return (
            [record["step"] for record in read_jsonl(path) if record["phase"] in phases]
            if path.exists()
            else []
        )

    def end(self, job: str, timeout_s: float = 600.0) -> str:
        """Wait until Slurm is done with the job; returns the state that it ended in."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait_for(job, lambda: self.cluster.field(job, "JobState") in ended, timeout_s)
        return self.cluster.field(job, "JobState")

    def wait_for(self, job: str, what: Callable[[], object], timeout_s: float = 600.0) -> None:
        """Until `what()` holds; shows the job's output when it does not within `timeout_s`, or the
        job has ended."""
        deadline = time.monotonic() + timeout_s
        ended = False
        for look in itertools.count(1):
            if what():
                return
            assert not ended and time.monotonic() < deadline, (
                f"not within {timeout_s:g} s\n{self.logs(job)}"
            )
            time.sleep(0.2)
            ended = look % 10 == 0 and self.cluster.field(job, "JobState") in (
                "COMPLETED",
                "FAILED",
                "CANCELLED",
            )

    def last_line(self, job: str) -> str:
        """The last line of the job's own output."""
        return self.output(job).rstrip().splitlines()[-1]

    def in_loop(self, job: str, name: str, steps: int = 2) -> None:
        """Wait until the run has recorded so many steps."""
        self.wait_for(job, lambda: len(self.steps(name)) >= steps)

    def logs(self, job: str) -> str:
        """Everything that the job wrote."""
        return self.run("logs", job)


def _number(said: str) -> str:
    """The number of the job in what `submit` printed."""
    found = re.search(r"submitted job (\d+)", said)
    assert found, said
    return found[1]


def wrong_clock(jobs: Jobs) -> str:
    """Lines by which preflight on n2 reads a clock that is a minute ahead."""
    folder = jobs.folder / "clock"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CLOCK)
    return ON_N2.format(
        step="preflight", lines=f"export PYTHONPATH={shlex.quote(str(folder))}:$PYTHONPATH"
    )


def processes_of(job: str) -> list[str]:
    """Processes of a job that run: their environment has its number or token, or their command line
    names its Ray."""
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


def find(job: str, *texts: str) -> psutil.Process:
    """A process of the job with all of these texts in its command line: the oldest of them."""
    found = [psutil.Process(int(line.split()[0])) for line in processes_of(job)]
    fitting = [
        process for process in found if all(text in " ".join(process.cmdline()) for text in texts)
    ]
    assert fitting, f"no process of job {job} with {texts}: {processes_of(job)}"
    return min(fitting, key=psutil.Process.create_time)


def rank_on(job: str, address: str) -> psutil.Process:
    """The child that holds the most memory of the raylet at `address`: a rank of the run."""
    children = find(job, "raylet/raylet", address).children()
    return max(children, key=lambda child: child.memory_info().rss)


def agent_of_second_node(job: str) -> psutil.Process:
    """The process that watches Ray on n2."""
    found = [
        psutil.Process(int(line.split()[0]))
        for line in processes_of(job)
        if "hybridflow.launch node" in line
    ]
    return next(process for process in found if process.environ().get("SLURMD_NODENAME") == "n2")


def engine_of(job: str) -> psutil.Process:
    """The scheduler of the job's engine; its environment does not name the job, but it runs in the
    driver's folder."""
    folder = find(job, "hybridflow.cli.main train").cwd()
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if (
            "sglang::scheduler" in " ".join(process.info["cmdline"] or [])
            and process.info["cwd"] == folder
        ):
            return process
    raise AssertionError(f"no engine of job {job} runs in {folder}")


def left_behind(job: str, within_s: float = 120.0) -> list[str]:
    """Processes and temporary folders of a job that are there `within_s` seconds after its end."""
    deadline = time.monotonic() + within_s
    while True:
        left = [*processes_of(job), *map(str, Path("/tmp").glob(f"hf-job-{job}-*"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.3)
