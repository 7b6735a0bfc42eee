"""Statistics of several answers against every subset of them, and against the published form of
pass@k."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest

from hybridflow.rollout.answer_statistics import answer_statistics, best_of, majority

VERL = json.loads(
    (Path(__file__).parents[2] / "golden" / "verl_validation.json").read_text(encoding="utf-8")
)


def test_verl_means_the_same_by_a_mean_and_draws_with_replacement_for_the_best() -> None:
    """The best@k of verl estimates the expectation over draws with replacement, computed here; ours
    is larger."""
    samples = VERL["samples"]
    verl = VERL["verl"]
    scores = np.array(VERL["scores"]).reshape(-1, samples)
    ours = answer_statistics(scores, samples)
    assert ours[f"mean@{samples}"] == pytest.approx(verl[f"mean@{samples}"], abs=1e-12)
    for k in (2, 4, 8):
        solved = 1 - (1 - scores.mean(axis=1)) ** k
        assert verl[f"best@{k}/mean"] == pytest.approx(solved.mean(), abs=0.02)
        assert ours[f"best@{k}"] >= solved.mean() + 0.01


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_the_best_of_k_is_the_mean_over_all_subsets(k: int) -> None:
    scores = np.random.default_rng(k).normal(size=(3, 5))
    wanted = [np.mean([max(one) for one in combinations(row, k)]) for row in scores]
    np.testing.assert_allclose(best_of(scores, k), wanted, rtol=1e-12)


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    scores = np.array([[1, 0, 0, 1, 0, 0], [0] * 6, [1] * 6], float)
    found = answer_statistics(scores.ravel(), 6)
    for k in (2, 4, 6):
        wanted = np.mean([1 - comb(6 - int(row.sum()), k) / comb(6, k) for row in scores])
        assert found[f"pass@{k}"] == pytest.approx(wanted, abs=1e-12) == found[f"best@{k}"]
    assert found["mean@6"] == pytest.approx(8 / 18) and set(found) == {
        "mean@6",
        *(f"{name}@{k}" for name in ("best", "worst", "pass") for k in (2, 4, 6)),
    }
    assert found["worst@2"] == pytest.approx(np.mean([1 / comb(6, 2), 0, 1]))


def test_a_score_between_has_no_pass_rate_and_answers_are_needed_for_a_majority() -> None:
    extras = [{"answer": "3"}, {"answer": "3"}, {"answer": "4"}, {"answer": None}]
    found = answer_statistics(np.array([0.5, 0.5, 1.0, 0.0]), 4, extras)
    assert found["maj@4"] == 0.5 and not any(name.startswith("pass") for name in found)
    assert not any(
        name.startswith("maj") for name in answer_statistics(np.ones(4), 4, [*extras[:3], {}])
    )


def test_equally_frequent_answers_share_the_majority() -> None:
    assert majority([1.0, 0.0, 0.0, 0.0], ["a", "b", "c", "c"], 2) == 0.25
    assert majority([1.0, 1.0, 0.0], ["a", "a", "b"], 3) == 1.0
    assert majority([1.0, 0.0, 0.0], ["a", "b", "b"], 3) == 0.0


def test_answers_that_a_verifier_finds_equal_are_one_vote() -> None:
    extras = [{"answer": text} for text in ("0.5", "1/2", "3", "3", "\\frac{1}{2}")]
    assert answer_statistics(np.array([1.0, 1.0, 0.0, 0.0, 1.0]), 5, extras)["maj@5"] == 1.0
