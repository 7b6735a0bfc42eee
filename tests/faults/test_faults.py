"""The covering campaign of the matrix: an engine, a rank, a worker and Ray are lost in one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.campaign import problems_of_message

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_loses_its_parts_ends_like_one_that_was_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--cover", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("the same command resumes from /place/e2e/checkpoints/x", ""),
        ("a file of /place/e2e: No space left on device; make room, or choose another place", ""),
        (
            "a file: No space left on device; make room, or choose another place",
            "names no file or folder",
        ),
        (
            "a file: read-only; make it writable; the same command resumes",
            "names no file or folder",
        ),
        ("something went wrong in /place/e2e", "no remedy"),
        ("", "the words ''"),
    ],
)
def test_a_message_says_what_to_do_and_where(words: str, problem: str) -> None:
    found = problems_of_message(words, 1, Path("/place"))
    assert (problem in found[0]) if problem else found == []
