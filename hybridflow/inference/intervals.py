"""Confidence intervals of means over prompts."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

LEVEL = 0.95
_Z = 1.959963984540054  # quantile of the normal distribution at (1 + LEVEL) / 2
RESAMPLES = 2000
_CHUNK = 1 << 22  # values drawn at a time
METHODS = {
    "wilson": "Wilson score interval: each prompt counts as one trial with outcome 0 or 1",
    "bootstrap": (
        f"percentiles of the mean over {RESAMPLES} resamples of the prompts, drawn with a fixed "
        "seed"
    ),
}


@dataclass(frozen=True)
class Interval:
    """A confidence interval at the level `LEVEL`, and the method used to compute it (one of
    `METHODS`).
    """

    low: float
    high: float
    method: str


def interval_of(values: np.ndarray) -> Interval | None:
    """Return the confidence interval of the mean of values [P], one per prompt. Prompts are
    independent, but the answers to a prompt are not, so each prompt counts once. If every value is
    0 or 1, Wilson's method is used, which is also valid near 0 and 1; otherwise the bootstrap.
    Returns None for a single prompt whose value is neither 0 nor 1.
    """
    values = np.asarray(values, np.float64)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson(float(values.mean()), len(values))
    return bootstrap(values) if len(values) > 1 else None


def wilson(share: float, trials: int) -> Interval:
    """Return Wilson's interval for a proportion of successes (Wilson 1927, doi:10.2307/2276774)."""
    spread = _Z * _Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    # rounding must not exclude a share of 0 or 1
    low = min(share, max(0.0, middle - half))
    high = max(share, min(1.0, middle + half))
    return Interval(low, high, "wilson")


def bootstrap(values: np.ndarray) -> Interval:
    """Return the bootstrap percentile interval of the mean of values [P] (Efron and Tibshirani
    1993, chapter 13). Deterministic for given values.
    """
    random = np.random.default_rng(0)
    means: list[np.ndarray] = []
    at_once = max(1, _CHUNK // len(values))
    for start in range(0, RESAMPLES, at_once):
        size = (min(at_once, RESAMPLES - start), len(values))
        means.append(values[random.integers(len(values), size=size)].mean(axis=1))
    ends = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low, high = np.quantile(np.concatenate(means), ends)
    return Interval(float(low), float(high), "bootstrap")
