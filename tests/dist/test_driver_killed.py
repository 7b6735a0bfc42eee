"""A driver killed with SIGKILL leaves nothing behind: no Ray process, no worker, no child of a
worker. And a new start works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def start_driver(out: Path) -> tuple[subprocess.Popen[bytes], list[int], str]:
    """The driver, the pids it reported (2 workers, then a child of each), and its cluster's
    temporary folder."""
    out.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.dist.harness.sc_workers", str(out)], cwd=ROOT
    )
    deadline = time.monotonic() + 240
    while not (out / "pids").exists():
        assert driver.poll() is None, "the driver ended early"
        assert time.monotonic() < deadline, "the driver did not come up"
        time.sleep(0.1)
    pids, temp_dir = (out / "pids").read_text().splitlines()
    return driver, [int(pid) for pid in pids.split()], temp_dir


def still_there(known: set[int], temp_dir: str) -> list[str]:
    """Processes of the cluster that run: by pid, or because their command line names its folder."""
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        ours = process.pid in known or any(temp_dir in word for word in words)
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            left.append(f"{process.pid} {' '.join(words)[:80]}")
    return left


def test_nothing_survives_a_killed_driver_and_a_restart_works(tmp_path: Path) -> None:
    for attempt in ("first", "again"):
        driver, pids, temp_dir = start_driver(tmp_path / attempt)
        known = {
            driver.pid,
            *pids,
            *(child.pid for child in psutil.Process(driver.pid).children(recursive=True)),
        }
        assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
        # driver, gcs, raylet, workers, sleepers, agents: the test does look at something
        assert len(known) >= 8
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        killed = time.monotonic()
        while (left := still_there(known, temp_dir)) and time.monotonic() < killed + 60:
            time.sleep(0.1)
        for process in left:  # a failing test leaves nothing behind either
            os.kill(int(process.split()[0]), signal.SIGKILL)
        assert not left, f"survived the {attempt} driver: {left}"
        print(
            f"{attempt}: {len(known)} processes gone {time.monotonic() - killed:.1f} s after "
            "SIGKILL"
        )
