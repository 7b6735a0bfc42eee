"""The kernels' entry of the micro suite: its metrics with small sizes, and its absence without a
GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.bench import run as runs
from hybridflow.bench.measurements import gpu_kernels
from hybridflow.bench.measurements.base import MEASUREMENTS, Place
from hybridflow.bench.result import Metric, read
from hybridflow.bench.run import Job, run

WHY = "it needs a GPU, but none was found"
NAMES = {
    "checksum",
    "pack fp32 as bf16",
    "pack bf16 as fp8",
    "scatter bf16",
    "GAE",
    "V-trace",
    "log_probs",
    "log_probs and top 32",
    "log_probs with gradients",
}


def test_without_a_gpu_the_result_says_what_was_not_run_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {**runs.describe_environment(), "accelerators": []}
    monkeypatch.setattr(runs, "describe_environment", lambda: here)
    said: list[str] = []
    found = run(Job("gpu_kernels", tmp_path), said.append)
    assert len(said) == 1 and said[0].endswith(f"not run: {WHY}")
    assert not found.metrics and read(tmp_path / "result.json") == found
    assert [(one.measurement, one.why) for one in found.not_run] == [("gpu_kernels", WHY)]
    assert "micro" in MEASUREMENTS.get("gpu_kernels").suites


@pytest.mark.slow
def test_each_operation_stands_beside_what_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cpu")
    for name, value in {"BYTES": 1 << 20, "VOCAB": 64, "HIDDEN": 8}.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    place = Place("", ("",), tmp_path, tmp_path)
    found = list(MEASUREMENTS.get("gpu_kernels").measure(place, ["tokens=16"]))
    assert {one.name.partition("/")[2] for one in found if isinstance(one, Metric)} == NAMES
    for metric in found:
        assert isinstance(metric, Metric) and metric.share and len(metric.rounds) == 7
        assert metric.peer is not None and metric.peer.name == "torch"
