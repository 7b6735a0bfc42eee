"""Benchmarks that need what this machine lacks say so, and touch no result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "words",
    [["kernels.py"], ["trl_steps.py", "--peer", "/nowhere/python"]],
    ids=["kernels", "trl"],
)
def test_without_a_gpu_or_its_peer_no_figure_is_taken(words: list[str]) -> None:
    before = {path.name: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    env = {**os.environ, "HYBRIDFLOW_PLATFORM": "cpu"}
    run = subprocess.run(
        [sys.executable, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=BENCHMARKS,
    )
    assert "no figure was taken" in run.stdout
    assert {path.name: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before
