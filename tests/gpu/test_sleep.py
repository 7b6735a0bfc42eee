"""Twenty times: what leaves the GPU comes back the same, and nothing stays behind."""

from __future__ import annotations

import pytest

from hybridflow.device.platform import Platform
from tests.dist.harness.ranks import NOTHING, run_ranks

pytestmark = pytest.mark.skipif(Platform.detect().kind != "cuda", reason="needs a GPU")


def test_twenty_times_lose_no_byte() -> None:
    (found,) = run_ranks(1, "tests.gpu.cases:slept", loaded=NOTHING, platform="cuda", hf="TINY", count=20)
    assert found["same"] == [True] * 20
    assert max(found["away"][2:]) <= found["away"][1], found["away"]  # the first time allocates what is kept
