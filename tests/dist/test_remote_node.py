"""Ranks of another node, in a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.slow
def test_one_that_hangs_or_was_stopped_is_found_as_on_the_drivers_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.dist.harness.remote_world", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == ["127.0.0.1", "127.0.0.2"]
    assert (
        "no answer from rank(s) 1 of 2; stacks are in their logs" in found["hung"]
        and found["stacks"]
    )
    assert found["stopped"].startswith("the worker process is stopped (SIGSTOP) (actor rank 1")
    assert (found["left"], found["again"]) == (False, [0, 1])
