"""A run on a file system whose renames, syncs and listings are late, as on NFS or Lustre, ends with
the numbers, samples and weights of one on a quick disk; also if it is killed and goes on."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.runs import Run
from tests.faults.oracle import differences
from tests.faults.shapes import words_of

STEPS = 4
# Loaded by every Python process of the run. Delays come before and after each call: a name appears
# late, and the process that made it goes on later than others that have seen it.
LATE = """
import os, random, time

_FOLDER, _NOTES, _LONGEST_S = os.environ["LATE_FOLDER"], os.environ["LATE_NOTES"], 2.0

def _is_late(given):
    try:
        path = os.readlink(f"/proc/self/fd/{given}") if isinstance(given, int) else os.fspath(given)
        return os.path.abspath(path).startswith(_FOLDER)
    except (OSError, TypeError, ValueError):
        return False

def _late(name):
    action = getattr(os, name)

    def late(*given, **named):
        if not given or not _is_late(given[0]):
            return action(*given, **named)
        drawn = random.SystemRandom()  # a fork would repeat its parent's numbers
        time.sleep(drawn.random() * _LONGEST_S / 2)
        with open(f"{_NOTES}/{os.getpid()}", "a") as notes:
            notes.write(f"{name}\\n")
        result = action(*given, **named)
        time.sleep(drawn.random() * _LONGEST_S / 2)
        return result

    setattr(os, name, late)

for _name in ("rename", "replace", "fsync", "scandir", "listdir"):
    _late(_name)
"""


@pytest.mark.slow
@pytest.mark.full
def test_a_run_on_a_late_file_system_ends_like_one_on_a_quick_one(tmp_path: Path) -> None:
    """Four ranks save after every step. Resumed ranks must find whole checkpoints."""
    quick = tmp_path / "quick"
    late = tmp_path / "late"
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "sitecustomize.py").write_text(LATE)
    site = {"PYTHONPATH": str(tmp_path), "LATE_FOLDER": str(late), "LATE_NOTES": str(notes)}

    def words(out: Path) -> list[str]:
        given = words_of("TP 2, PP 2, EP 2", tmp_path / "work", out)
        return [*given, f"trainer.total_steps={STEPS}"]

    def saved() -> int:
        latest = late / "e2e" / "checkpoints" / "latest.json"
        name = json.loads(latest.read_text())["folder"] if latest.exists() else ""
        return int(name.rpartition("_")[2]) if name.startswith("global_step_") else 0

    with Run(tmp_path / "output", *words(quick)) as run:
        assert run.end() == 0, run.err
    with Run(tmp_path / "output", *words(late), site=site) as run:
        run.wait_for(lambda: saved() >= 1)
        run.send(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL and run.left_behind() == []
    with Run(tmp_path / "output", *words(late), site=site) as run:
        assert run.end() == 0, run.err
        assert "resuming from" in run.out and run.left_behind() == []
    assert differences(late / "e2e", quick / "e2e") == []
    late_calls = [Counter(file.read_text().split()) for file in notes.iterdir()]
    print(len(late_calls), "processes", sum(late_calls, Counter()))
    assert sum(calls["fsync"] > 0 and calls["replace"] > 0 for calls in late_calls) >= 2
    assert sum(calls["fsync"] > 0 for calls in late_calls) >= 4 + 1  # ranks and driver
    assert sum(calls["scandir"] + calls["listdir"] for calls in late_calls) > 0
