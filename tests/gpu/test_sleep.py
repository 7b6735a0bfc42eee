"""Twenty times: what leaves the GPU comes back the same, and nothing stays behind."""

from __future__ import annotations

from tests.gpu.lane import KIND, needs_gpu, on

pytestmark = needs_gpu


def test_twenty_times_lose_no_byte() -> None:
    found = on(KIND, "slept", hf="TINY", count=20)
    assert found["same"] == [True] * 20
    # the first time allocates what is kept
    assert max(found["away"][2:]) <= found["away"][1], found["away"]
