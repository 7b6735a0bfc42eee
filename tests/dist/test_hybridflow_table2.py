"""Table 2 of the HybridFlow paper, to the byte, from gathers that were executed."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def formulas(design: str, p: int, t: int, d: int, t_g: int) -> dict[str, Fraction]:
    """Shares of the model's bytes, as the paper prints them (p_g = 1)."""
    tp, tpd = t * p, t * p * d
    return {
        "ds_chat": {"received": Fraction(tpd - 1, tpd), "peak": Fraction(1), "redundancy": Fraction(1, tpd)},
        "hybridflow_v": {"received": Fraction(tp - 1, tp), "peak": Fraction(1), "redundancy": Fraction(1, tp)},
        "hybridflow": {"received": Fraction(tp - t_g, t_g * tp), "peak": Fraction(1, t_g), "redundancy": Fraction(0)},
    }[design]


@pytest.mark.slow
def test_volumes_peaks_and_redundancy_are_those_of_the_paper() -> None:
    command = [sys.executable, "benchmarks/hybridflow_table2.py", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == 6
    for row in rows:
        want = formulas(row["design"], row["p"], row["t"], row["d"], row["t_g"])
        assert {key: row[key] for key in want} == {key: share * row["model"] for key, share in want.items()}, row
