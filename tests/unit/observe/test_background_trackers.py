"""A tracker that fails, hangs or is slow neither stops nor slows the run, and what it lost is
counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.observe import background
from hybridflow.observe.tracker import Tracker

SOURCE = """
import json, os, signal, time
from hybridflow.observe.trackers.base import tracker

class Lines:
    def __init__(self, run_dir):
        self.path = run_dir / "lines.jsonl"

    def log(self, step, phase, wall_time, metrics):
        with self.path.open("a") as file:
            file.write(json.dumps([step, phase]) + "\\n")

    def truncate_after(self, phase, step): ...
    def close(self): ...

@tracker("hangs")
class Hangs(Lines):
    def log(self, step, phase, wall_time, metrics):
        if step == 3:
            (self.path.parent / "pid").write_text(str(os.getpid()))
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            while True:
                time.sleep(3600)
        super().log(step, phase, wall_time, metrics)

@tracker("hangs_at_end")
class HangsAtEnd(Lines):
    def close(self):
        time.sleep(3600)

@tracker("fails")
class Fails(Lines):
    def log(self, step, phase, wall_time, metrics):
        if step % 2:
            raise OSError("no route to the server")
        super().log(step, phase, wall_time, metrics)

@tracker("dies")
class Dies(Lines):
    def log(self, step, phase, wall_time, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().log(step, phase, wall_time, metrics)

@tracker("never_starts")
def never_starts(run_dir):
    raise RuntimeError("no account")
"""


def logged(
    folder: Path, name: str, steps: int, timeout_s: float, waits: Path | None = None
) -> tuple[list[str], float]:
    """Log steps to a tracker; the losses, and the seconds that logging took."""
    (folder / "mine.py").write_text(SOURCE)
    tracker = Tracker(folder, ("jsonl", f"{folder}/mine.py:{name}"), timeout_s)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        tracker.log(step, {"a": 1.0})
    seconds = time.perf_counter() - started
    while waits is not None and not (waits.exists() and waits.read_text()):
        time.sleep(0.05)
    return tracker.close(), seconds


def test_one_that_hangs_is_ended_and_its_loss_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_WAITING", 500)
    # more than the queue and the pipe to the process hold
    losses, seconds = logged(tmp_path, "hangs", 3000, 1.0, tmp_path / "pid")
    [said] = losses
    assert "2998 of 3000 records were lost (train steps 3-3000)" in said
    assert said.endswith("metrics.jsonl contains them")
    assert seconds < 3.0  # a millisecond a step; one wait for the tracker would be an hour
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3000
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_one_that_fails_keeps_the_other_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [said], _ = logged(tmp_path, "fails", 5, 30)
    assert "3 of 5 records were lost (train steps 1, 3, 5)" in said
    assert "OSError: no route to the server (the run continues)" in caplog.text
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [[2, "train"], [4, "train"]]


@pytest.mark.parametrize(
    ("name", "lost", "reason"),
    [
        ("dies", "2 of 4 records were lost (train steps 3-4)", "exited with status -9"),
        ("never_starts", "4 of 4 records were lost (train steps 1-4)", "RuntimeError: no account"),
    ],
)
def test_one_that_ends_early_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, lost: str, reason: str
) -> None:
    [said], _ = logged(tmp_path, name, 4, 30)
    assert lost in said and reason in caplog.text


@pytest.mark.slow
def test_one_that_hangs_at_its_end_loses_nothing_that_it_took(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    tracker = Tracker(tmp_path, (f"{tmp_path}/mine.py:hangs_at_end",), 2.0)
    tracker.log(1, {"a": 1.0})
    while not (tmp_path / "lines.jsonl").exists():
        time.sleep(0.05)
    started = time.perf_counter()
    [said] = tracker.close()
    assert "it received all records, but did not exit within 2 s" in said
    assert time.perf_counter() - started < 6


@pytest.mark.slow
def test_one_that_hangs_ends_after_its_driver_was_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    program = (
        "import os, signal, sys, time, pathlib; from hybridflow.observe.tracker import Tracker; "
        "folder = pathlib.Path(sys.argv[1]); "
        "tracker = Tracker(folder, (f'{folder}/mine.py:hangs_at_end',), 1.0); "
        "tracker.log(1, {'a': 1.0})\n"
        "while not (folder / 'lines.jsonl').exists(): time.sleep(0.02)\n"
        "print(tracker._apart[0]._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    host = int(done.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{host}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{host}").exists()
