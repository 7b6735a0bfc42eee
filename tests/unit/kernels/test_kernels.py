"""Every kernel in Triton's interpreter against a float64 reference, and what `import
hybridflow_kernels` loads on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # Triton's interpreter

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OPERATIONS = sorted(path.stem for path in (ROOT / "kernels").glob("[a-z]*.py"))
CASES = [str(HERE / f"{name}_cases.py") for name in OPERATIONS]


def run(words: list[str], interpreted: bool) -> subprocess.CompletedProcess[str]:
    """A process of its own: Triton reads the variable when it is imported, and other tests import
    it without."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        env["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_every_operation_has_its_cases() -> None:
    assert OPERATIONS
    assert (
        sorted(path.stem.removesuffix("_cases") for path in HERE.glob("*_cases.py")) == OPERATIONS
    )


def test_torch_forms_equal_the_same_references() -> None:
    cases = [str(HERE / f"{name}_cases.py") for name in ("digest", "scans", "slices")]
    found = run(["-m", "pytest", "-p", "no:cacheprovider", *cases], interpreted=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.parametrize("which", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_kernels_equal_their_references_in_the_interpreter(which: str) -> None:
    found = run(["-m", "pytest", "-p", "no:cacheprovider", "-m", which, *CASES], interpreted=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout


def test_on_a_cpu_nothing_imports_triton() -> None:
    imports = "; ".join(f"import hybridflow_kernels.{name}" for name in OPERATIONS)
    found = run(["-c", f"import sys; {imports}; print('triton' in sys.modules)"], interpreted=False)
    assert found.stdout == "False\n", found.stderr
