"""Comparison of two runs, and of the nodes in a run, using bootstrap tests of ratios.

The speed of a shared machine varies by a third within minutes. The gate therefore judges the ratio
of a metric to the limit (or peer) measured in the same rounds. Nodes are compared by the value
itself, because a slow node also slows its own limits.

The test statistic is the difference between the midmeans of the log ratios; a midmean is the mean
of the inner half, which is robust to a few bad rounds and needs fewer rounds than a median. Its
distribution is bootstrapped. Neighbouring rounds are drawn together because the machine was under
the same load. If several processes measured a metric, processes are drawn first, because memory
placement is the same in all rounds of a process but differs between processes. A metric has changed
if the difference exceeds its bound and the interval excludes zero. The interval's confidence is
Bonferroni-corrected over all metrics of the comparison, so that comparing many metrics does not
raise the rate of false alarms.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hybridflow.bench.result import MIN_ROUNDS, Metric, Result, differences

ALARM = (
    0.05  # probability that any interval of a comparison excludes zero without a change
)
DRAWS = 4000
NODE_BOUND = 0.10  # clocks of identical nodes differ by a few percent
WIDEST = 0.12  # largest bound derived from the spread, so that a slowdown of 20% is still detected
SEEN = 0.2  # a slowdown that must be excluded before a metric is called the same
Verdict = Literal[
    "same", "unclear", "slower", "faster", "not judged", "only in A", "only in B"
]


@dataclass(frozen=True)
class Change:
    """The change of a metric between two runs. `change` is the relative change in cost (0.2 means
    20% slower), with the confidence interval `low` to `high`.
    """

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
    """A node on which a metric is worse than on the other nodes, by the fraction `excess` (0.2
    means 20%).
    """

    node: str
    name: str
    excess: float
    bound: float
    value: float
    others: float
    unit: str


@dataclass(frozen=True)
class Comparison:
    """All changes between two runs, the differences between their machines, and the outlier nodes
    in the second run."""

    changes: tuple[Change, ...]
    differences: dict[str, list[str]]
    outliers: tuple[Outlier, ...]

    @property
    def same_hardware(self) -> bool:
        """True if the two runs used the same hardware and can therefore be compared."""
        return "hardware" not in self.differences

    @property
    def slower(self) -> list[str]:
        """The names of the metrics that are slower or missing in the second run."""
        bad = ("slower", "only in A")
        return [change.name for change in self.changes if change.verdict in bad]

    @property
    def exit_code(self) -> int:
        """Exit status: 0 if no metric is slower and no node is an outlier, 1 otherwise, 3 if
        nothing was judged because the hardware differs."""
        if not self.same_hardware:
            return 3
        return 1 if self.slower or self.outliers else 0


def compare(first: Result, second: Result, bound: float | None = None) -> Comparison:
    """Compare two runs on the same machine.

    Args:
        first: the baseline.
        second: the run to judge.
        bound: overrides the metrics' bounds.
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
            changes.append(_unjudged(one, "only in A", first=one.value))
        elif other:
            changes.append(_unjudged(other, "only in B", second=other.value))
    return Comparison(tuple(changes), found, outliers(second))


def _unjudged(metric: Metric, verdict: Verdict, **values: Any) -> Change:
    return Change(metric.name, metric.node, metric.unit, verdict, **values)


def _change(one: Metric, other: Metric, alarm: float, *, judge: bool) -> Change:
    blank = _unjudged(
        other, "not judged", first=one.value, second=other.value, bound=other.bound
    )
    if not judge:
        return replace(blank, why="different hardware")
    if other.unit == "count":
        change = (one.against(other) or 1.0) - 1
        verdict = _verdict(change, change, change, other.bound)
        return replace(blank, change=change, verdict=verdict)
    if other.better == "none":
        return replace(blank, why="neither direction is better")
    a = _log_ratios(one)
    b = _log_ratios(other)
    if a is None or b is None:
        return replace(blank, why="no reference was measured in the same rounds")
    fewest = min(len(a), len(b))
    if fewest < MIN_ROUNDS:
        return replace(
            blank,
            why=f"only {fewest} rounds were measured; at least {MIN_ROUNDS} are required",
        )
    spread = max(_spread(a), _spread(b))
    limit = max(other.bound, min(spread, WIDEST))
    processes = (other.processes, one.processes)
    low, middle, high = interval(b, a, alarm, _seed(other), processes=processes)
    verdict = _verdict(low, middle, high, math.log1p(limit))
    why = ""
    if verdict == "same" and high - middle > math.log1p(SEEN):
        verdict = "unclear"
        why = f"rounds differ by {spread:.0%}, so a slowdown of 20% could go undetected"
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


def outliers(result: Result) -> tuple[Outlier, ...]:
    """Return the nodes on which a metric is worse than the median of the other nodes, worst first.
    With two nodes, only the worse one can be an outlier.
    """
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for metric in result.metrics:
        if metric.node and metric.better != "none" and metric.value > 0:
            by_name[metric.name].append(metric)
    groups = [group for group in by_name.values() if len(group) > 1]
    tests = sum(map(len, groups))
    found = []
    for group in groups:
        shortest = min(len(metric.rounds) for metric in group)
        costs = np.log([_costs(metric, metric.rounds[:shortest]) for metric in group])
        for index, metric in enumerate(group):
            # the nodes ran each round at the same time, so the load of a shared machine cancels out
            excess = costs[index] - np.median(np.delete(costs, index, axis=0), axis=0)
            limit = max(NODE_BOUND, metric.bound, min(_spread(excess), WIDEST))
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
    """Return the ends and the middle (low, middle, high) of a confidence interval for the
    difference between the midmeans. The true difference is beyond each end with probability
    `alarm`.

    Args:
        values, baseline: [rounds], in measurement order.
        alarm: one-sided error probability.
        seed: makes the result reproducible for given rounds.
        processes: number of processes that measured the values and the baseline. Each has the same
            number of rounds.
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
    """Return [DRAWS] midmeans of resampled rounds. Processes are drawn first, then blocks of
    neighbouring rounds (circular block bootstrap)."""
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
    """Return the midmean of each draw: [draws, rounds] -> [draws]."""
    rounds = values.shape[1]
    inner = slice(rounds // 4, rounds - rounds // 4)
    return np.asarray(np.sort(values, axis=1)[:, inner].mean(axis=1))


def _log_ratios(metric: Metric) -> np.ndarray | None:
    """Return [rounds] log ratios of the metric's cost to the reference's cost, or None if no
    reference has the same number of rounds."""
    for reference in (metric.limit, metric.yardstick, metric.peer):
        if reference and len(reference.rounds) == len(metric.rounds):
            costs = _costs(metric, metric.rounds)
            return np.log(costs / _costs(metric, reference.rounds))
    return None


def _costs(metric: Metric, values: tuple[float, ...]) -> np.ndarray:
    """Convert values in the metric's unit to [rounds] costs; lower is better."""
    positive = np.maximum(np.asarray(values, dtype=float), 1e-12)
    return positive if metric.better == "lower" else 1 / positive


def _spread(logs: np.ndarray) -> float:
    """Return 1.48 times the median absolute deviation, an estimate of the standard deviation that
    is robust to a few bad rounds."""
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))


def _seed(metric: Metric) -> int:
    return zlib.crc32(f"{metric.node} {metric.name}".encode())
