"""One start of four processes for everything that `test_parallel` asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dist.cases.fault import faults
from tests.dist.cases.gradient import CUTS, IN_MAKE_TEST, gradients
from tests.dist.cases.nonfinite import nonfinite
from tests.dist.cases.precision import bf16
from tests.dist.harness.worlds import Worlds


def run_all(folder: str) -> dict[str, Any]:
    """Results of this rank by topic."""
    worlds = Worlds()
    result = {
        "gradients": gradients(
            worlds, Path(folder), [cut for cut in CUTS if cut.name in IN_MAKE_TEST]
        ),
        "nonfinite": nonfinite(worlds),
        "faults": faults(worlds, Path(folder)),
        "bf16": bf16(worlds),
    }
    worlds.finish()
    return result


def gradients_of_all_cuts(folder: str) -> dict[str, dict[str, float]]:
    """What `gradients` finds on this rank."""
    worlds = Worlds()
    found = gradients(worlds, Path(folder), CUTS)
    worlds.finish()
    return found
