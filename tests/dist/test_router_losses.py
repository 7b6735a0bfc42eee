"""Losses on routers are those of the papers, whatever the packing, the cut and what the policy's
loss counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist.cases.router_losses import CUTS, FORMULAS
from tests.dist.harness.ranks import run_ranks

pytestmark = pytest.mark.slow
CASES = "tests.dist.cases.router_losses"


def test_gradients_of_a_router_are_those_of_the_formulas() -> None:
    (results,) = run_ranks(1, f"{CASES}:by_formulas")
    for (_, max_tokens, _), found in zip(FORMULAS, results, strict=True):
        assert (found["micro_batches"] > 1) == (max_tokens == 30)
        expected = np.array(found["expected"])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(found["found"], expected, atol=2e-5 * max(1.0, found["main"]))
        np.testing.assert_allclose(found["metrics"], found["losses"], rtol=1e-4)


@pytest.mark.full
def test_the_z_loss_does_not_depend_on_how_the_batch_is_cut() -> None:
    """The z-loss is a mean over tokens; load balancing is one of micro-batches."""
    results = [result for rank in run_ranks(4, f"{CASES}:z_gradients") for result in rank]
    whole = next(result for result in results if result["name"] == CUTS[0].name)
    assert {result["name"] for result in results} == {cut.name for cut in CUTS}
    for result in results:
        for layer, added in result["added"].items():
            assert np.abs(added).max() > 1e-3
            np.testing.assert_allclose(
                added, whole["added"][layer], atol=5e-5, err_msg=f"{result['name']}, {layer}"
            )
    for cut in CUTS:
        pairs = [
            result["metric"]
            for result in results
            if result["name"] == cut.name and result["metric"]
        ]
        value = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        assert value == pytest.approx(whole["metric"][0] / whole["metric"][1], rel=1e-4), cut.name
