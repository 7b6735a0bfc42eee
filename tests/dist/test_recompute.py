"""What is computed again for the backward pass gives the gradients of what is kept, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.cases.recompute import CASES, PARALLEL_CASES
from tests.dist.harness.ranks import run_ranks

pytestmark = pytest.mark.slow


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["same_keys"]
        assert result["nonzero"] > 0.9, result["name"]
        assert result["differing"] == [], result["name"]
        for module, (kept, again) in result["calls"].items():
            assert again == 2 * kept > 0, (result["name"], module)


def test_gradients_are_bit_equal_with_and_without_recomputation() -> None:
    (results,) = run_ranks(1, "tests.dist.cases.recompute:run")
    assert len(results) == len(CASES)
    check(results)


def test_fields_of_megatron_take_effect() -> None:
    (result,) = run_ranks(1, "tests.dist.cases.recompute:run_fields")
    assert result["differing"] == []
    kept, again, layers = result["routers"]
    assert again == kept + kept // layers  # one layer's router has run once more
    assert 0 < result["exact"] < 1e-5


@pytest.mark.full
def test_gradients_are_bit_equal_over_ranks_and_stages() -> None:
    for results in run_ranks(2, "tests.dist.cases.recompute:run_parallel"):
        assert len(results) == len(PARALLEL_CASES)
        for result in results:
            assert result["same_keys"]
            assert result["differing"] == [], result["name"]
