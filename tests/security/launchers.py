"""A run, alive in the middle of its first step, in each way in which one is started: by `hybridflow
train` alone, as a Slurm job, in a cluster that `launch/ray/cluster.sh` has made, and Ray as a pod
of launch/ray/kuberay.yaml starts it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.process.secret import VARIABLE
from tests.e2e.runs import HYBRIDFLOW, Run
from tests.security.sockets import processes_of
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Jobs
from tests.slurm.jobs import processes_of as processes_of_job

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "ray" / "cluster.sh"
# Stands still in the first step until what a test does with the live run is over.
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    open(f"{folder}/live", "w").close()
    while not os.path.exists(f"{folder}/done"):
        time.sleep(0.02)
    return sum(map(ord, solution_str)) % 7 / 7
"""
POD = "10.9.0.2"  # its address, in a network of its own
ONE_PROCESS = ("cluster=one-process", "rollout=tiny")


@dataclass
class Live:
    """A run in its first step.

    Attributes:
        processes: those that it has now, its Ray among them.
        run_folders: where the user keeps data and results, with the umask's modes.
        folder: of the run itself in there, with its metrics and logs.
    """

    processes: Callable[[], list[psutil.Process]]
    run_folders: list[Path]
    folder: Path


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that another user can enter, as those of a cluster's file system are."""
    folder = Path(tempfile.mkdtemp(prefix="hft-", dir="/tmp"))
    os.chmod(folder, 0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local(
    shared: Path,
    shape: Sequence[str] = ONE_PROCESS,
    site: Mapping[str, str | None] = MappingProxyType({}),
    more: Callable[[], list[psutil.Process]] = list,
) -> Iterator[Live]:
    """`hybridflow train` on this machine; after the block it must end well, with both steps. `more` are processes of
    a Ray that it has joined."""
    words = [
        "--config-name",
        "e2e",
        *_settings(shared),
        *shape,
        "actor=tiny",
        "sft.steps=1",
        "trainer.total_steps=2",
    ]
    words += [f"output_dir={shared / 'runs'}", "trainer.val_before_train=false"]
    # the job's secret is given, as ranks that are forks do not show in /proc what they were told
    command = ("env", f"{VARIABLE}={secrets.token_hex(32)}", HYBRIDFLOW)
    with Run(shared / "output", "train", *words, command=command, site=site) as run:
        # as /tmp is: what protects must not be the test's own folder
        os.chmod(run.temp_dir, 0o1777)
        run.wait_for((shared / "live").exists, 600)
        driver = run.process.pid
        yield Live(lambda: [*processes_of(driver), *more()], [shared], shared / "runs" / "e2e")
        (shared / "done").touch()
        assert run.end(300) == 0, run.err
    _check_steps(shared / "runs" / "e2e")


def _check_steps(folder: Path) -> None:
    """The run has recorded both of its steps, once each."""
    records = read_jsonl(folder / "metrics.jsonl")
    assert [one["step"] for one in records if one["phase"] == "train"] == [1, 2]


def _settings(shared: Path) -> list[str]:
    (shared / "reward.py").write_text(REWARD)
    prepare("arithmetic", shared / "data", None, load_config("e2e").data.prepare.options)
    words = [
        f"data.prepare.out={shared / 'data'}",
        "reward=custom",
        f"reward.path={shared / 'reward.py'}",
    ]
    return [*words, f"+reward.kwargs.folder={shared}"]


@contextmanager
def by_hand(
    shared: Path,
) -> Iterator[tuple[str, dict[str, str], Callable[[], list[psutil.Process]]]]:
    """A head that cluster.sh has started on loopback: its address, the environment of who joins it,
    its processes."""
    first = str(_free_block(9))
    (shared / "token").touch(0o600)
    (shared / "token").write_text(secrets.token_hex(32))
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    joins = {"RAY_AUTH_TOKEN_PATH": str(shared / "token")}
    env = {
        **rest,
        **joins,
        "PATH": path,
        "FIRST_PORT": first,
        "HOME": str(shared),
        "TMPDIR": "/tmp",
    }
    env |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "RAY_worker_niceness": "0"}

    def run(*words: str) -> None:
        done = subprocess.run(
            ["bash", str(SCRIPT), *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run("head", "127.0.0.1")
        yield (
            f"127.0.0.1:{first}",
            joins,
            lambda: [one for one in psutil.process_iter() if _names(one, first)],
        )
    finally:
        run("stop")
    assert not list(Path("/tmp").glob(f"hf-cluster-{first}-*"))


def _names(process: psutil.Process, first: str) -> bool:
    """Whether the process is a part of the cluster at that port, or has a part of it as an
    ancestor."""
    with suppress(psutil.Error):
        family = [process, *process.parents()]
        words = [" ".join(one.cmdline()) for one in family]
        return any(
            f"hf-cluster-{first}-" in line or f"--gcs_server_port={first}" in line for line in words
        )
    return False


@contextmanager
def joined(shared: Path) -> Iterator[Live]:
    """`hybridflow train cluster.address=...` in a cluster made by hand."""
    with by_hand(shared) as (address, joins, processes):
        shape = (*ONE_PROCESS, f"cluster.address={address}")
        with local(shared, shape, joins, processes) as live:
            yield live


@contextmanager
def slurm_job(shared: Path, cluster: SlurmCluster) -> Iterator[Live]:
    """A job on two nodes of a real Slurm."""
    jobs = Jobs(cluster, shared, _settings(shared))
    number = jobs.submit("edges", "sft=none", "trainer.total_steps=2")
    jobs.wait_for(number, (shared / "live").exists)

    def processes() -> list[psutil.Process]:
        found = {
            one.pid: one
            for line in processes_of_job(number)
            for one in processes_of(int(line.split()[0]))
        }
        return list(found.values())

    folder = jobs.folder / "runs" / "edges"
    yield Live(processes, [shared], folder)
    (shared / "done").touch()
    assert jobs.end(number) == "COMPLETED", jobs.logs(number)
    _check_steps(folder)


@contextmanager
def pod(shared: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's head as KubeRay starts it in the first pod of launch/ray/kuberay.yaml: in namespaces of
    its own, with a /tmp and a /dev/shm of its own. Yields the first process in there, for
    `nsenter`."""
    head = pod_of_head()
    secret = secrets.token_hex(32)
    env = {
        one["name"]: one.get("value", secret)
        for one in head["template"]["spec"]["containers"][0]["env"]
    }
    env |= {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(shared),
    }
    options = {
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        **head["rayStartParams"],
    }
    words = " ".join(f"--{name}={value}" for name, value in options.items())
    made = (
        "mount -t tmpfs pod /tmp && chmod 1777 /tmp && mount -t tmpfs pod /dev/shm && chmod 1777 "
        "/dev/shm"
    )
    made += f" && ip addr add {POD}/32 dev lo && ip link set lo up"
    start = (
        f"{sys.executable} -m ray.scripts.scripts start --head --node-ip-address={POD} --block "
        f"{words}"
    )
    space = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (
        (shared / "pod.log").open("wb") as log,
        subprocess.Popen(
            [*space, "bash", "-c", f"{made} && exec {start}"], env=env, stdout=log, stderr=log
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 200
            # what Ray says once it has started
            while b"--block" not in (shared / "pod.log").read_bytes():
                assert process.poll() is None and time.monotonic() < deadline, (
                    shared / "pod.log"
                ).read_text()
                time.sleep(0.2)
            yield process
        finally:
            process.kill()  # and with it everything in its namespace


def pod_of_head() -> dict[str, Any]:
    """The head's group in launch/ray/kuberay.yaml."""
    manifest = yaml.safe_load((ROOT / "launch" / "ray" / "kuberay.yaml").read_text())
    found: dict[str, Any] = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]
    return found


def _free_block(count: int) -> int:
    """The first of `count` free ports in a row, below the ephemeral ones."""
    for first in range(23000 + os.getpid() % 500 * 10, 32000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
