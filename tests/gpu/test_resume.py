"""A run that is interrupted goes on as one that is not, with the Adam of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.lane import KIND, needs_gpu, needs_transformer_engine, on

pytestmark = needs_gpu


@pytest.mark.parametrize(
    "torch_modules", [True, pytest.param(False, marks=needs_transformer_engine)]
)
@pytest.mark.parametrize("hf", ["TINY", "DENSE"])
def test_resuming_equals_going_on(hf: str, torch_modules: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    found = on(KIND, "resumed", hf=hf, dtype="bfloat16", torch_modules=torch_modules, folder=folder)
    assert found["steps"] == [2, 3, 3], found
    # kernels that add in another order each time may differ by one rounding of bfloat16
    assert found["off"] <= 2**-7 and found["norms"][0] == pytest.approx(
        found["norms"][1], rel=1e-3
    ), found
