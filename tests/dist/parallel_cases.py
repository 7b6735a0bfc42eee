"""One start of four processes for everything that `test_parallel` asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dist.fault_cases import faults
from tests.dist.gradient_cases import gradients
from tests.dist.nonfinite_cases import nonfinite
from tests.dist.precision_cases import bf16
from tests.dist.worlds import Worlds


def run_all(folder: str) -> dict[str, Any]:
    """Results of this rank by topic."""
    worlds = Worlds()
    result = {
        "gradients": gradients(worlds, Path(folder)),
        "nonfinite": nonfinite(worlds),
        "faults": faults(worlds, Path(folder)),
        "bf16": bf16(worlds),
    }
    worlds.finish()
    return result
