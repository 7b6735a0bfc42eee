"""Intervals of means over prompts: against published numbers, the normal approximation, and the share of
samples whose interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.inference.intervals import Interval, bootstrap, interval_of, wilson


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [
        # Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_the_published_interval(right: int, trials: int, low: float, high: float) -> None:
    found = wilson(right / trials, trials)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    other = wilson(1 - right / trials, trials)
    assert (other.low, other.high) == pytest.approx((1 - found.high, 1 - found.low))


def test_all_or_none_right_leaves_room_on_one_side_only() -> None:
    assert interval_of(np.ones(10)) == Interval(wilson(1.0, 10).low, 1.0, "wilson")
    assert interval_of(np.zeros(10)) == Interval(0.0, wilson(0.0, 10).high, "wilson")
    assert 0.7 < wilson(1.0, 10).low < 1.0


def test_the_bootstrap_follows_the_normal_approximation_and_repeats_itself() -> None:
    values = np.random.default_rng(3).beta(2, 5, size=2000)
    found = bootstrap(values)
    spread = 1.96 * values.std() / np.sqrt(len(values))
    assert found.low == pytest.approx(values.mean() - spread, abs=0.15 * spread)
    assert found.high == pytest.approx(values.mean() + spread, abs=0.15 * spread)
    assert bootstrap(values) == found


def test_the_method_follows_from_the_values() -> None:
    binary = interval_of(np.array([0.0, 1.0, 1.0]))
    mixed = interval_of(np.array([0.0, 0.5, 1.0]))
    assert binary is not None and binary.method == "wilson"
    assert mixed is not None and mixed.method == "bootstrap"
    assert interval_of(np.array([0.5])) is None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_about_95_of_100_intervals_hold_the_truth(share: float) -> None:
    random = np.random.default_rng(1)
    kinds = {
        "wilson": lambda: (random.random(100) < share).astype(float),
        # four answers a prompt, with prompts of unequal difficulty
        "bootstrap": lambda: random.binomial(4, random.beta(4 * share, 4 * (1 - share), 100)) / 4,
    }
    for method, draw in kinds.items():
        held = 0
        for _ in range(200):
            found = interval_of(draw())
            assert found is not None and found.method == method
            held += found.low <= share <= found.high
        assert 180 <= held <= 199, method
