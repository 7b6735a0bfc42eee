"""Every layout trains as one process does: log-probs, loss, gradient norm and weights after three
clipped and scheduled updates.

`PARITY_TABLE=docs/parity.md pytest -m full tests/dist/test_parity.py` writes the table of measured
differences. The gpu lane's Megatron is measured too; `PYTHONPATH=.venv/megatron-0.19 pytest
tests/dist` runs other tests against it.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.dist.cases.parity import CASES
from tests.dist.harness.ranks import run_ranks

TOLERANCE = 1e-5
LONG_S = 1500  # for all layouts in one set of processes, 8 of them on 2 cores


def run(names: list[str], folder: Path, timeout_s: float = 230) -> list[dict[str, Any]]:
    """All cases in one set of processes, as many as the largest needs."""
    ranks = max(CASES[name].world for name in names)
    found = run_ranks(
        ranks,
        "tests.dist.cases.parity:run_cases",
        timeout_s=timeout_s,
        names=names,
        folder=str(folder),
    )
    by_name = {result["name"]: result for results in found for result in results}
    return [by_name[name] for name in names]


def failures(results: list[dict[str, Any]], megatron: str) -> list[str]:
    assert {result["megatron"] for result in results} == {megatron}
    quantities = ("log_probs", "loss", "grad_norm", "weights")
    # not (x < t): a NaN fails
    return [
        f"{r['name']}: {q} off by {r[q]:.1e}"
        for r in results
        for q in quantities
        if not r[q] < TOLERANCE
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "megatron", ["installed", pytest.param("0.19", marks=pytest.mark.full)], indirect=True
)
def test_a_covering_subset_trains_as_one_process(tmp_path: Path, megatron: str) -> None:
    results = run(
        [name for name, case in CASES.items() if case.quick and case.world <= 4], tmp_path
    )
    assert failures(results, megatron) == []
    one = results[0]["history"]
    assert min(norm for _, norm, _ in one) > 1.0  # or nothing would have been clipped
    # warm-up, then cosine
    assert [rate for _, _, rate in one] == pytest.approx([5e-3, 1e-2, 8.681981e-3], rel=1e-5)


@pytest.mark.slow
@pytest.mark.full
def test_every_layout_trains_as_one_process(tmp_path: Path, megatron: str) -> None:
    assert len(CASES) >= 30
    small = run([name for name, case in CASES.items() if case.world <= 4], tmp_path, LONG_S)
    # the files of the one-process cases are there
    large = run([name for name, case in CASES.items() if case.world > 4], tmp_path, LONG_S)
    results = small + large
    path = os.environ.get("PARITY_TABLE")
    if path and megatron == metadata.version("megatron-core"):
        Path(path).write_text(table(results))
    assert failures(results, megatron) == []


def table(results: list[dict[str, Any]]) -> str:
    """The measured differences as markdown."""
    lines = [
        "# Measured: every layout against one process",
        "",
        (
            "This table shows how much every parallel layout differs from a single process. "
            "It is written by"
        ),
        (
            "`PARITY_TABLE=docs/parity.md make test-full ARGS=tests/dist/test_parity.py`. "
            "The models have 4 layers in"
        ),
        (
            "fp32 and take three updates with gradient clipping, warm-up and cosine decay on "
            "packed sequences of"
        ),
        (
            "unequal length. Each value is the largest absolute difference from one process: "
            "in log-probs and"
        ),
        (
            "entropies before the first update, in the loss and (relative) gradient norm of "
            "the updates, and in the"
        ),
        f"weights after them. The test fails at {TOLERANCE:.0e}.",
        "",
        "| Layout | Processes | log-probs | loss | gradient norm | weights |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {r['name']} | {r['world']} | {r['log_probs']:.1e} | {r['loss']:.1e} | "
            f"{r['grad_norm']:.1e} | {r['weights']:.1e} |"
        )
        for r in results
        if r["world"] > 1
    ]
    return "\n".join(lines) + "\n"
