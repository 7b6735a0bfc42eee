"""The load behind expert biases counts the tokens of the batch, however they are packed, cut and
recomputed."""

from __future__ import annotations

import pytest

from tests.dist.cases.load import CUTS
from tests.dist.harness.ranks import run_ranks

pytestmark = pytest.mark.slow


def test_each_expert_has_as_many_tokens_as_in_a_pass_without_padding() -> None:
    results = [result for rank in run_ranks(4, "tests.dist.cases.load:loads") for result in rank]
    found = {result["name"]: result for result in results}
    assert found.keys() == {cut.name for cut in CUTS}
    expected = found[CUTS[0].name]["expected"]
    assert sum(map(sum, expected)) > 1000 and not any(expected[0])
    assert found[CUTS[0].name]["padding"] == 0
    assert all(found[cut.name]["padding"] > 0 for cut in CUTS[1:]), {
        name: result["padding"] for name, result in found.items()
    }
    assert {name: result["counts"] for name, result in found.items()} == dict.fromkeys(
        found, expected
    )
