"""The kernels' entry of the micro suite: without a GPU it says so; its metrics, with the torch forms at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.bench import run as runs
from hybridflow.bench.measurements import gpu_kernels
from hybridflow.bench.measurements.base import MEASUREMENTS, Place
from hybridflow.bench.result import Metric, read
from hybridflow.bench.run import Job, run


def test_without_a_gpu_the_result_says_what_was_not_run_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {**runs.describe_environment(), "accelerators": []}
    monkeypatch.setattr(runs, "describe_environment", lambda: here)
    said: list[str] = []
    found = run(Job("gpu_kernels", tmp_path), said.append)
    assert said == ["gpu_kernels: not run: it needs a GPU, and there is none"]
    assert not found.metrics and read(tmp_path / "result.json") == found
    assert [(one.measurement, one.why) for one in found.not_run] == [
        ("gpu_kernels", "it needs a GPU, and there is none")
    ]
    assert "micro" in MEASUREMENTS.get("gpu_kernels").suites


def test_each_operation_stands_beside_what_bounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cpu")
    for name, value in {"BYTES": 1 << 20, "TOKENS": 16, "VOCAB": 64, "HIDDEN": 8}.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    found = list(gpu_kernels.gpu_kernels(Place("", ("",), tmp_path, tmp_path)))
    assert {metric.name.partition("/")[2] for metric in found if isinstance(metric, Metric)} == {
        *("checksum", "pack fp32 as bf16", "pack bf16 as fp8", "scatter bf16", "GAE", "log_probs")
    }
    assert all(metric.share and len(metric.rounds) == 7 for metric in found)
