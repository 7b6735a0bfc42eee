"""Comparison of two runs, and of the nodes of one: bootstrap tests of ratios.

Shared machines swing by a third within minutes, and so does everything on them. What is judged is
therefore the ratio of a metric to the limit (or peer) of the same rounds. Nodes are compared by the
value itself, since a slow node slows its own limits as well.

The test uses the logarithms of the ratios, the difference of their middles (the mean of the inner
half, which a few bad rounds do not move and which needs fewer rounds than a median), and its
bootstrap distribution. Neighbouring rounds are drawn together because they share the machine's
weather. If several processes measured a metric, processes are drawn first: memory placement is the
same in all rounds of one, and another in the next. A metric has changed if the difference is larger
than its bound and the interval does not reach zero. The interval's confidence is Bonferroni's over
all metrics of the comparison, so many metrics do not raise a false alarm together.
"""

from __future__ import annotations

import math
import statistics
import zlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hybridflow.bench.result import MIN_ROUNDS, Metric, Reference, Result, differences

ALARM = 0.05  # chance that any interval of a comparison excludes zero where nothing has changed
DRAWS = 4000
NODE_BOUND = 0.10  # nodes of one kind differ by a few percent in their clocks
WIDEST = 0.12  # of a bound that follows the spread, so that a fifth is still seen
SEEN = 0.2  # a slowdown that must be excluded before a metric is called the same
Verdict = Literal[
    "same", "unclear", "slower", "faster", "not judged", "only in A", "only in B"
]


@dataclass(frozen=True)
class Change:
    """A metric in two runs. `change` is of its cost: 0.2 is a fifth slower; `low` and `high` its
    interval."""

    name: str
    node: str
    unit: str
    verdict: Verdict
    first: float | None = None
    second: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float = 0.05
    why: str = ""


@dataclass(frozen=True)
class Outlier:
    """A node that is worse than the others in one metric, by `excess` (0.2: a fifth)."""

    node: str
    name: str
    excess: float
    bound: float
    value: float
    others: float
    unit: str


@dataclass(frozen=True)
class Comparison:
    """All changes between two runs, the differences of their machines, and node outliers of the
    second."""

    changes: tuple[Change, ...]
    differences: dict[str, list[str]]
    outliers: tuple[Outlier, ...]

    @property
    def same_hardware(self) -> bool:
        """True if the two may be judged by each other."""
        return "hardware" not in self.differences

    @property
    def exit_code(self) -> int:
        """0: no metric is slower and no node stands out; 1: one is; 3: other hardware, nothing was
        judged."""
        if not self.same_hardware:
            return 3
        slower = any(
            change.verdict in ("slower", "only in A") for change in self.changes
        )
        return 1 if slower or self.outliers else 0


def compare(first: Result, second: Result, bound: float | None = None) -> Comparison:
    """Compare two runs of one machine.

    Args:
        first: the baseline.
        second: the run in question.
        bound: replaces the metrics' own.
    """
    before = {(metric.node, metric.name): metric for metric in first.metrics}
    after = {(metric.node, metric.name): metric for metric in second.metrics}
    found = differences(first, second)
    alarm = ALARM / max(len(before.keys() & after.keys()), 1)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        one = before.get(key)
        other = after.get(key)
        if one and other:
            judged = other if bound is None else replace(other, bound=bound)
            changes.append(_change(one, judged, alarm, judge="hardware" not in found))
        elif one:
            changes.append(
                Change(one.name, one.node, one.unit, "only in A", first=one.value)
            )
        elif other:
            changes.append(
                Change(
                    other.name, other.node, other.unit, "only in B", second=other.value
                )
            )
    return Comparison(tuple(changes), found, outliers(second))


def _change(one: Metric, other: Metric, alarm: float, *, judge: bool) -> Change:
    blank = Change(
        name=other.name,
        node=other.node,
        unit=other.unit,
        verdict="not judged",
        first=one.value,
        second=other.value,
        bound=other.bound,
    )
    if not judge:
        return replace(blank, why="other hardware")
    if other.unit == "count":
        change = 0.0
        if one.value and other.value:
            change = (
                float(_costs(other, (other.value,))[0] / _costs(one, (one.value,))[0])
                - 1
            )
        return replace(
            blank, change=change, verdict=_verdict(change, change, change, other.bound)
        )
    if other.better == "none":
        return replace(blank, why="neither direction is better")
    a = _log_ratios(one)
    b = _log_ratios(other)
    if a is None or b is None:
        return replace(blank, why="nothing was measured next to it in the same rounds")
    fewest = min(len(a), len(b))
    if fewest < MIN_ROUNDS:
        return replace(blank, why=f"{fewest} rounds; {MIN_ROUNDS} are needed")
    spread = max(_spread(a), _spread(b))
    limit = max(other.bound, min(spread, WIDEST))
    processes = (other.processes, one.processes)
    low, middle, high = interval(b, a, alarm, _seed(other), processes=processes)
    verdict = _verdict(low, middle, high, math.log1p(limit))
    why = ""
    if verdict == "same" and high - middle > math.log1p(SEEN):
        verdict = "unclear"
        why = f"rounds differ by {spread:.0%}: a fifth would not be seen"
    return replace(
        blank,
        verdict=verdict,
        change=math.expm1(middle),
        low=math.expm1(low),
        high=math.expm1(high),
        bound=limit,
        why=why,
    )


def _verdict(low: float, middle: float, high: float, edge: float) -> Verdict:
    if low > 0 and middle > edge:
        return "slower"
    if high < 0 and middle < -edge:
        return "faster"
    return "same"


def outliers(result: Result, bound: float = NODE_BOUND) -> tuple[Outlier, ...]:
    """Return nodes that are worse than the rest in a metric, the worst first. Of two nodes the
    worse is named."""
    by_name: dict[str, list[Metric]] = {}
    for metric in result.metrics:
        if metric.node and metric.better != "none" and metric.value > 0:
            by_name.setdefault(metric.name, []).append(metric)
    groups = [group for group in by_name.values() if len(group) > 1]
    tests = sum(map(len, groups))
    found = []
    for group in groups:
        shortest = min(len(metric.rounds) for metric in group)
        costs = np.log([_costs(metric, metric.rounds[:shortest]) for metric in group])
        for index, metric in enumerate(group):
            # rounds of the nodes ran side by side: the weather of a shared machine cancels
            excess = costs[index] - np.median(np.delete(costs, index, axis=0), axis=0)
            limit = max(bound, metric.bound, min(_spread(excess), WIDEST))
            if metric.unit == "count" or shortest < MIN_ROUNDS:
                middle = float(np.median(excess))
                low = middle
            else:
                low, middle, _ = interval(
                    excess, np.zeros(1), ALARM / tests, _seed(metric)
                )
            if low > 0 and middle > math.log1p(limit):
                others = [other.value for other in group if other is not metric]
                found.append(
                    Outlier(
                        node=metric.node,
                        name=metric.name,
                        excess=math.expm1(middle),
                        bound=limit,
                        value=metric.value,
                        others=statistics.median(others),
                        unit=metric.unit,
                    )
                )
    return tuple(sorted(found, key=lambda outlier: -outlier.excess))


def interval(
    values: np.ndarray,
    baseline: np.ndarray,
    alarm: float,
    seed: int,
    processes: tuple[int, int] = (1, 1),
) -> tuple[float, float, float]:
    """Return (low, middle, high) of the difference of the middles; chance passes each end with
    `alarm`.

    Args:
        values, baseline: [rounds], in the order in which they were measured.
        alarm: one-sided chance.
        seed: makes the answer the same for the same rounds.
        processes: that measured the values and the baseline, as many rounds in each.
    """
    generator = np.random.default_rng(seed)
    middle = float(_middles(values[None])[0] - _middles(baseline[None])[0])
    drawn = _drawn(values, generator, processes[0]) - _drawn(
        baseline, generator, processes[1]
    )
    low, high = np.quantile(drawn, [alarm, 1 - alarm])
    return min(float(low), middle), middle, max(float(high), middle)


def _drawn(
    values: np.ndarray, generator: np.random.Generator, processes: int
) -> np.ndarray:
    """Return [DRAWS] middles of rounds, drawn in blocks of neighbours (circular block bootstrap) of
    drawn processes."""
    count = len(values) // processes
    block = max(1, round(count ** (1 / 3)))
    starts = generator.integers(0, count, (DRAWS, processes, -(-count // block)))
    places = (starts[..., None] + np.arange(block)) % count
    places = places.reshape(DRAWS, processes, -1)[..., :count]
    if processes > 1:
        places = places + count * generator.integers(
            0, processes, (DRAWS, processes, 1)
        )
    return _middles(values[places.reshape(DRAWS, -1)])


def _middles(values: np.ndarray) -> np.ndarray:
    """Return the means of the inner halves: [draws, rounds] -> [draws]."""
    quarter = values.shape[1] // 4
    ordered = np.sort(values, axis=1)
    inner: np.ndarray = ordered[:, quarter : values.shape[1] - quarter].mean(axis=1)
    return inner


def _log_ratios(metric: Metric) -> np.ndarray | None:
    """Return [rounds] logarithms of costs over those of the reference; None without one of as many
    rounds."""
    references: tuple[Reference | None, ...] = (
        metric.limit,
        metric.yardstick,
        metric.peer,
    )
    for reference in references:
        if reference and len(reference.rounds) == len(metric.rounds):
            ratios = _costs(metric, metric.rounds) / _costs(metric, reference.rounds)
            return np.asarray(np.log(ratios))
    return None


def _costs(metric: Metric, values: tuple[float, ...]) -> np.ndarray:
    """Return [rounds] costs of values of the metric's unit: lower is better."""
    positive = np.maximum(np.asarray(values, dtype=float), 1e-12)
    return positive if metric.better == "lower" else 1 / positive


def _spread(logs: np.ndarray) -> float:
    """Return 1.48 times the median distance from the median: a standard deviation that a few bad
    rounds do not move."""
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))


def _seed(metric: Metric) -> int:
    return zlib.crc32(f"{metric.node} {metric.name}".encode())
