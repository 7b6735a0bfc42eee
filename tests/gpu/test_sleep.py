"""Twenty times: what leaves the GPU comes back the same, and nothing stays behind."""

from __future__ import annotations

from tests.gpu.lane import KIND, needs_gpu, on

pytestmark = needs_gpu


def test_twenty_times_lose_no_byte() -> None:
    found = on(KIND, "slept", hf="TINY", count=20)
    assert found["same"] == [True] * 20
    # the first times allocate what is kept; a leak would go on
    assert max(found["away"][10:]) <= found["away"][9], found["away"]
