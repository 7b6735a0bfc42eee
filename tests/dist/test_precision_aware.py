"""An Adam with moments in bfloat16 or float16 goes on after a load as if it had not been
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.cases.precision_aware import KINDS
from tests.dist.harness.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_resuming_equals_going_on(ranks: int, tmp_path: Path) -> None:
    for results in run_ranks(ranks, "tests.dist.cases.precision_aware:run", folder=str(tmp_path)):
        assert [found["kind"] for found in results] == list(KINDS)
        for found in results:
            kind = found["kind"]
            main = "float16" if kind == "float16" else "float32"
            assert found["dtypes"] == {"exp_avg": kind, "exp_avg_sq": kind, "master_param": main}
            assert found["step"] == 2
            assert found["moments"] > 0
            assert found["loaded"] == [] and found["after"] == [], kind
            assert found["norms"][0] == found["norms"][1] > 0
