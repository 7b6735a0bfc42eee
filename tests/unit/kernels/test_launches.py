"""Every launch function of the kernels, called under a stand-in for an sm_90 device: what a run is
given compiles, uses Hopper's tensor cores where it multiplies matrices, and keeps everything in
registers. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
GROUPS = ("sums", "best", "gradients", "descriptors", "checksum", "fp8", "packed_scans", "messages")
# of each kind one in `make test`: a product of matrices that is long to compile, and a sum that is
# not; the others' results are those of the interpreter's tests
IN_MAKE_TEST = ("sums", "checksum")
# Triton compiles a kernel anew for an integer of 1, a multiple of 16, and any other, unless it is
# told not to. Of these arguments each kind must have been launched; all other integers are those
# that it is told about, or are 1 always.
EVERY_KIND = {
    "sums": {"h"},
    "gradients": {"h"},
    "fp8": {"c", "column", "width", "stride_n", "stride_r", "stride_c", "out_n", "out_r"},
}


def compiled(
    group: str, folder: Path, *words: str, program: str = "tests.unit.kernels.launches"
) -> list[dict[str, Any]]:
    """The lines of one group, from a process of its own: Triton reads the variable when it is
    imported."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    found = subprocess.run(
        [sys.executable, "-m", program, group, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def faults(lines: list[dict[str, Any]]) -> list[str]:
    """What is wrong with these forms."""
    found = []
    for line in lines:
        if line["error"]:
            found.append(f"{line['form']}: {line['error']}")
        for kernel in line["kernels"]:
            if kernel["local_bytes"]:
                found.append(
                    f"{line['form']}: {kernel['kernel']} spills {kernel['local_bytes']} bytes a "
                    "thread"
                )
            if line["product"] and not kernel["wgmma"]:
                found.append(f"{line['form']}: {kernel['kernel']} has no wgmma")
    return found


def kinds(lines: list[dict[str, Any]]) -> dict[str, set[str]]:
    """The kinds of integers that each argument was launched with."""
    found = defaultdict(set)
    for line in lines:
        for kernel in line["kernels"]:
            for name, said in kernel["arguments"].items():
                found[name].add("1" if said == "1" else "16" if said.endswith(" 16") else "other")
    return found


@pytest.mark.slow  # Triton's compiler
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[] if group in IN_MAKE_TEST else [pytest.mark.full])
        for group in GROUPS
    ],
)
def test_what_is_launched_compiles_without_spilling(group: str, tmp_path: Path) -> None:
    lines = compiled(group, tmp_path)
    assert faults(lines) == []
    assert any(line["kernels"] for line in lines)
    seen = kinds(lines)
    assert {name: seen[name] for name in EVERY_KIND.get(group, ())} == {
        name: {"1", "16", "other"} for name in EVERY_KIND.get(group, ())
    }


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_many_more_sizes(group: str, tmp_path: Path) -> None:
    assert faults(compiled(group, tmp_path, "--full")) == []


def test_faults_are_seen() -> None:
    kernel = {"kernel": "k", "local_bytes": 8, "wgmma": 0}
    assert len(faults([{"form": "f", "error": "no", "product": True, "kernels": [kernel]}])) == 3
