"""Whether two runs differ, and which node stands out: bootstrap tests of ratios, not two numbers.

Machines that others share swing by a third within minutes, and so does everything on them. What is judged is therefore
the ratio of a metric to the limit (or peer) of the same rounds. Nodes are compared by the value itself, since a slow
node slows its own limits as well.

The test: logarithms of the ratios, the difference of their middles (the mean of the inner half, which a few bad rounds
do not move and which needs fewer rounds than a median), and its bootstrap distribution, in which runs of neighbouring
rounds are drawn together, since they share the machine's weather. Where several processes measured a metric, processes
are drawn first: where memory lies is the same in all rounds of one, and another in the next. A metric has changed where
that difference is larger than its bound and the interval does not reach zero. The confidence of the interval is
Bonferroni's over all metrics of the comparison, so that many metrics do not raise a false alarm together.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybridflow.bench.result import MIN_ROUNDS, Metric, Reference, Result, differences

ALARM = 0.05  # chance that any interval of a comparison excludes zero where nothing has changed
DRAWS = 4000
NODE_BOUND = 0.10  # nodes of one kind differ by a few percent in their clocks
WIDEST = 0.12  # of a bound that follows the spread, so that a fifth is still seen
SEEN = 0.2  # a slowdown that must be excluded before a metric is called the same
Verdict = Literal["same", "unclear", "slower", "faster", "not judged", "only in A", "only in B"]


@dataclass(frozen=True)
class Change:
    """A metric in two runs. `change` is of its cost: 0.2 is a fifth slower; `low` and `high` its interval."""

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
    """All changes between two runs, what their machines differ in, and which nodes stand out in the second."""

    changes: tuple[Change, ...]
    differences: dict[str, list[str]]
    outliers: tuple[Outlier, ...]

    @property
    def same_hardware(self) -> bool:
        """Whether the two may be judged by each other."""
        return "hardware" not in self.differences

    @property
    def exit_code(self) -> int:
        """0: no metric is slower and no node stands out; 1: one is; 3: other hardware, nothing was judged."""
        if not self.same_hardware:
            return 3
        slower = any(change.verdict in ("slower", "only in A") for change in self.changes)
        return 1 if slower or self.outliers else 0


def compare(first: Result, second: Result, bound: float | None = None) -> Comparison:
    """Compare two runs of one machine.

    Args:
        first: the baseline.
        second: the run in question.
        bound: in place of the metrics' own.
    """
    sides = [{(metric.node, metric.name): metric for metric in result.metrics} for result in (first, second)]
    keys = list(dict.fromkeys([*sides[0], *sides[1]]))
    found = differences(first, second)
    num_judged = sum(key in sides[0] and key in sides[1] for key in keys)
    changes = []
    for key in keys:
        one, other = sides[0].get(key), sides[1].get(key)
        if other is None:
            assert one is not None
            changes.append(Change(one.name, one.node, one.unit, "only in A", first=one.value))
        elif one is None:
            changes.append(Change(other.name, other.node, other.unit, "only in B", second=other.value))
        else:
            changes.append(_change(one, other, ALARM / max(num_judged, 1), bound, judge="hardware" not in found))
    return Comparison(tuple(changes), found, outliers(second))


def _change(one: Metric, other: Metric, alarm: float, bound: float | None, *, judge: bool) -> Change:
    shown = {"first": one.value, "second": other.value, "bound": bound or other.bound}
    if why := "" if judge else "other hardware":
        return Change(other.name, other.node, other.unit, "not judged", **shown, why=why)
    if other.unit == "count":
        change = _cost(other.value, other) / _cost(one.value, one) - 1 if one.value and other.value else 0.0
        limit = bound or other.bound
        verdict: Verdict = "slower" if change > limit else "faster" if change < -limit else "same"
        return Change(other.name, other.node, other.unit, verdict, one.value, other.value, change, bound=limit)
    costs, why = [], ""
    for metric in (one, other):
        ratios = _ratios(metric)
        costs.append(ratios)
        if ratios is None:
            why = "nothing was measured next to it in the same rounds"
        elif len(ratios) < MIN_ROUNDS:
            why = f"{len(ratios)} rounds; {MIN_ROUNDS} are needed"
    if metric.better == "none":
        why = "neither direction is better"
    if why or costs[0] is None or costs[1] is None:
        return Change(other.name, other.node, other.unit, "not judged", **shown, why=why)
    a, b = np.log(costs[0]), np.log(costs[1])
    spread = max(_spread(a), _spread(b))
    limit = max(bound or other.bound, min(spread, WIDEST))
    low, middle, high = interval(b, a, alarm, _seed(other), processes=(other.processes, one.processes))
    edge = math.log1p(limit)
    verdict = "slower" if low > 0 and middle > edge else "faster" if high < 0 and middle < -edge else "same"
    if verdict == "same" and high - middle > math.log1p(SEEN):
        verdict, why = "unclear", f"rounds differ by {spread:.0%}: a fifth would not be seen"
    return Change(
        other.name, other.node, other.unit, verdict, one.value, other.value,
        math.expm1(middle), math.expm1(low), math.expm1(high), limit, why,
    )  # fmt: skip


def outliers(result: Result, bound: float = NODE_BOUND) -> tuple[Outlier, ...]:
    """Nodes that are worse than the rest in a metric, the worst first. Of two nodes the worse one is named."""
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for metric in result.metrics:
        if metric.node and metric.better != "none" and metric.value > 0:
            by_name[metric.name].append(metric)
    groups = [group for group in by_name.values() if len(group) > 1]
    tests = sum(len(group) for group in groups)
    found = []
    for group in groups:
        costs = {metric.node: np.log(_absolute(metric)) for metric in group}
        for metric in group:
            others = [values for node, values in costs.items() if node != metric.node]
            shortest = min(len(values) for values in costs.values())
            middle = np.median(np.stack([values[:shortest] for values in others]), axis=0)
            own = costs[metric.node][:shortest]
            spread = _spread(own - middle)
            limit = max(bound, metric.bound, min(spread, WIDEST))
            if metric.unit == "count" or shortest < MIN_ROUNDS:
                low = excess = float(np.median(own - middle))
            else:  # rounds of the nodes ran side by side: the weather of a shared machine cancels
                low, excess, _ = interval(own - middle, np.zeros(1), ALARM / tests, _seed(metric))
            if low > 0 and excess > math.log1p(limit):
                rest = statistics.median(other.value for other in group if other.node != metric.node)
                found.append(
                    Outlier(metric.node, metric.name, math.expm1(excess), limit, metric.value, rest, metric.unit)
                )
    return tuple(sorted(found, key=lambda outlier: -outlier.excess))


def interval(
    values: np.ndarray,
    baseline: np.ndarray,
    alarm: float,
    seed: int,
    draws: int = DRAWS,
    processes: tuple[int, int] = (1, 1),
) -> tuple[float, float, float]:
    """(low, middle, high) of the difference of the middles: each end is passed by chance with `alarm`.

    Args:
        values, baseline: [rounds], in the order in which they were measured.
        alarm: one-sided chance.
        seed: makes the answer the same for the same rounds.
        draws: of the bootstrap.
        processes: that measured the values and the baseline, as many rounds in each.
    """
    generator = np.random.default_rng(seed)
    middle = float(_middles(values[None])[0] - _middles(baseline[None])[0])
    drawn = _drawn(values, generator, draws, processes[0]) - _drawn(baseline, generator, draws, processes[1])
    low, high = np.quantile(drawn, [alarm, 1 - alarm])
    return min(float(low), middle), middle, max(float(high), middle)


def _drawn(values: np.ndarray, generator: np.random.Generator, draws: int, processes: int) -> np.ndarray:
    """[draws] middles of rounds drawn in blocks of neighbours (circular block bootstrap), of drawn processes."""
    count = len(values) // processes
    block = max(1, round(count ** (1 / 3)))
    starts = generator.integers(0, count, (draws, processes, -(-count // block)))
    places = (starts[..., None] + np.arange(block)) % count
    chosen = generator.integers(0, processes, (draws, processes, 1)) if processes > 1 else 0
    places = places.reshape(draws, processes, -1)[..., :count] + count * chosen
    return _middles(values[places.reshape(draws, -1)])


def _middles(values: np.ndarray) -> np.ndarray:
    """[draws, rounds] -> [draws]: the means of the inner halves."""
    count = values.shape[1]
    inner: np.ndarray = np.sort(values, axis=1)[:, count // 4 : count - count // 4].mean(axis=1)
    return inner


def _ratios(metric: Metric) -> np.ndarray | None:
    """[rounds] costs over those of what ran next to it; None without one of as many rounds."""
    for reference in (metric.limit, metric.yardstick, metric.peer):
        if reference is not None and len(reference.rounds) == len(metric.rounds):
            return _absolute(metric) / _absolute(metric, reference)
    return None


def _absolute(metric: Metric, reference: Reference | None = None) -> np.ndarray:
    """[rounds] costs: what is lower is better."""
    values = np.asarray((reference or metric).rounds, dtype=float)
    return np.maximum(values, 1e-12) if metric.better == "lower" else 1 / np.maximum(values, 1e-12)


def _cost(value: float, metric: Metric) -> float:
    return value if metric.better == "lower" else 1 / value


def _spread(logs: np.ndarray) -> float:
    """1.48 times the median distance from the median: a standard deviation that a few bad rounds do not move."""
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))


def _seed(metric: Metric) -> int:
    return zlib.crc32(f"{metric.node} {metric.name}".encode())
