"""A part of Ray is killed or stopped under a waiting driver: it is told within seconds, and a fresh
cluster starts in the same process. A stop while Ray starts leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ClusterLostError
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup
from tests.dist.harness.sc_workers import Worker

pytestmark = pytest.mark.slow
CONFIG = ClusterConfig(start_timeout_s=90, call_timeout_s=60)
PARTS = {"gcs": "gcs_server", "raylet": "raylet/raylet", "agent": "runtime_env/agent/main.py"}


def part_of_ray(cluster: Cluster, part: str) -> psutil.Process:
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            line = " ".join(one.cmdline())
            found += [one] * (PARTS[part] in line and str(cluster.temp_dir) in line)
    [process] = found
    return process


def lose(part: str, number: signal.Signals, tmp_path: Path) -> tuple[float, str, Path]:
    """Seconds until the driver, which waits for a call, knew of the loss; its message; the
    cluster's folder."""
    with pytest.raises(ClusterLostError) as told, Cluster.start(CONFIG, tmp_path) as cluster:
        group = WorkerGroup(
            cluster, ResourcePool.allocate(cluster, 1, 1), Worker, role="actor", log_dir=tmp_path
        )
        waiting = group.call(Worker.nap, 1, 60.0)
        assert cluster.temp_dir is not None
        part_of_ray(cluster, part).send_signal(number)
        began = time.monotonic()
        try:
            waiting.result()
        finally:
            seconds = time.monotonic() - began
            pids = group.pids()
            group.kill()
    assert not any(map(psutil.pid_exists, pids))
    return seconds, str(told.value), cluster.temp_dir


@pytest.mark.parametrize(
    ("part", "number", "within_s"),
    [
        ("gcs", signal.SIGKILL, 10),
        pytest.param("raylet", signal.SIGKILL, 10, marks=pytest.mark.full),
        pytest.param("agent", signal.SIGKILL, 10, marks=pytest.mark.full),
        pytest.param("raylet", signal.SIGSTOP, 20, marks=pytest.mark.full),
    ],
)
def test_a_lost_part_of_ray_is_told_and_a_fresh_cluster_starts(
    part: str, number: signal.Signals, within_s: float, tmp_path: Path
) -> None:
    seconds, message, folder = lose(part, number, tmp_path)
    print(f"{part} {number.name}: told after {seconds:.1f} s: {message}")
    assert seconds < within_s
    assert "Ray's " in message and "logs/ray" in message
    assert not folder.exists() and (tmp_path / "logs" / "ray").is_dir()
    with Cluster.start(CONFIG, tmp_path) as cluster:
        group = WorkerGroup(
            cluster, ResourcePool.allocate(cluster, 1, 1), Worker, role="actor", log_dir=tmp_path
        )
        assert group.run(Worker.who) == 0
        group.kill()


START = """
import sys
from hybridflow.config.schema import ClusterConfig
from hybridflow.process.stopping import terminate_as_interrupt
from hybridflow.single_controller import Cluster
print("ready", flush=True)
try:
    with terminate_as_interrupt(), Cluster.start(ClusterConfig(), sys.argv[1]) as cluster:
        print("up", flush=True)
        sys.stdin.read()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "after_s"),
    [
        pytest.param(signal.SIGINT, 0.4, marks=pytest.mark.full),
        *(pytest.param(signal.SIGTERM, after / 4, marks=pytest.mark.full) for after in range(12)),
        *(pytest.param(signal.SIGINT, after / 4, marks=pytest.mark.full) for after in range(12)),
    ],
)
def test_a_stop_while_ray_starts_ends_with_a_word(
    number: signal.Signals, after_s: float, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="hfs-", dir="/tmp") as short:  # Ray's sockets lie in it
        stop_while_ray_starts(number, after_s, tmp_path, Path(short))


def stop_while_ray_starts(
    number: signal.Signals, after_s: float, tmp_path: Path, temp_dir: Path
) -> None:
    env = {**os.environ, "TMPDIR": str(temp_dir)}
    with subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", START, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
        time.sleep(after_s)
        started = {child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
        driver.send_signal(number)
        out, err = driver.communicate(timeout=240)
    assert driver.returncode == 0 and out.endswith("interrupted\n"), (out, err)
    deadline = time.monotonic() + 60
    while (
        any(map(psutil.pid_exists, started)) or [*temp_dir.iterdir()]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, started))
    assert not [*temp_dir.glob("hf-ray-*")]
