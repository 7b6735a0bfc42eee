"""The covering campaign of the matrix: an engine, a rank, a worker and Ray are lost in one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_loses_its_parts_ends_like_one_that_was_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--cover", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == 5
