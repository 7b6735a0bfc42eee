"""The bounds on rounding hold with the instructions of other processors, which the libraries are
told to keep to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
# torch's own kernels, MKL and oneDNN, by each library's variable; and what they then say of
# themselves
SETTINGS = {
    "avx2": (
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
        ("torch AVX2", "(Intel(R) AVX2) enabled processors", "isa:Intel AVX2"),
    ),
    "sse": (
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        },
        ("torch DEFAULT", "(Intel(R) SSE4.2) enabled processors", "isa:Intel SSE4.1"),
    ),
}
TESTS = ("tests/dist/test_weight_layouts.py", "tests/dist/test_engines.py", "-m", "not full")
PROBE = """
import torch
print("torch", torch.backends.cpu.get_cpu_capability(), flush=True)
ones = torch.ones(64, 64)
ones @ ones
ones.to_mkldnn().to_dense()
"""


def said(environment: Mapping[str, str]) -> str:
    """What the libraries of a process with these variables say of the instructions that they
    use."""
    env = {**os.environ, **environment, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bounds_on_rounding_hold_with_the_instructions_of(name: str) -> None:
    if "Intel(R) 64" not in said({}):
        pytest.skip(
            "MKL does not say that this is an Intel processor, and keeps to no setting on others"
        )
    environment, wanted = SETTINGS[name]
    found = said(environment)
    assert [text for text in wanted if text not in found] == [], found
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
