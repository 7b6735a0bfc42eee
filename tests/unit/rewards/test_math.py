"""The verifier `math` against math-verify as its own manual uses it: a pair at a time, with its own
deadlines."""

from __future__ import annotations

from typing import Any

import pytest
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.parser import parse_latex_cached

from hybridflow.config.schema import RewardConfig
from hybridflow.rewards import RewardManager
from hybridflow.rewards.verifiers.base import VERIFIERS
from tests.unit.rewards.math_pairs import pairs


def score(name: str, response: str, truth: Any) -> float:
    return float(VERIFIERS.get(name).function(response, truth).score)


def agreeing(count: int, seed: int) -> int:
    """Compares as many pairs; returns how many are right answers."""
    right = 0
    for truth, response in pairs(count, seed):
        expected = parse(f"\\boxed{{{truth}}}", extraction_config=[LatexExtractionConfig()])
        judged = verify(expected, parse(response))
        # or the verifier would be given what math-verify has read just now
        parse_latex_cached.cache_clear()
        assert score("math", response, truth) == float(judged), (truth, response)
        right += judged
    return right


@pytest.mark.slow
def test_agreement_with_math_verify() -> None:
    assert 30 < agreeing(100, seed=1) < 90


@pytest.mark.slow
@pytest.mark.full
def test_agreement_with_math_verify_on_2500_pairs() -> None:
    assert 1000 < agreeing(2500, seed=0) < 2000


@pytest.mark.slow
def test_pooled_rows_have_the_scores_of_single_ones() -> None:
    rows = list(pairs(12, seed=2)) * 2
    with RewardManager(RewardConfig(processes=2)) as manager:
        found = manager.score(
            ["math"] * len(rows), [text for _, text in rows], [truth for truth, _ in rows]
        )
    assert [result.score for result in found] == [
        score("math", text, truth) for truth, text in rows
    ]


def test_math_and_geometry(caplog: pytest.LogCaptureFixture) -> None:
    assert score("math", r"so \boxed{7}", "7") == 1 and score("math", r"so \boxed{8}", "7") == 0
    assert score("math", "no answer", "7") == 0
    found = VERIFIERS.get("geo3k").function(r"<think>x</think> so \boxed{7}", "7")
    assert found.score == 1 and found.extra == {"answer": "7", "accuracy": 1.0, "format": 1.0}
    assert score("geo3k", r"so \boxed{7}", "7") == pytest.approx(0.9)
    assert score("geo3k", r"<think>x</think> so \boxed{8}", "7") == pytest.approx(0.1)
    assert not caplog.records


def test_a_ground_truth_that_is_no_expression_is_named() -> None:
    with pytest.raises(ValueError, match="the ground truth '' is not a valid expression"):
        score("math", r"\boxed{7}", "")
