"""The gate: quiet between equal runs on a restless machine; a slowdown of a fifth is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridflow.bench.gate import compare, interval, outliers
from hybridflow.bench.result import Metric, Reference, Result, fingerprint_of
from tests.unit.bench.samples import METRICS, simulated

TRIES = 20
NODES = ("n1", "n2", "n3", "n4")


def slower(a: int, b: int, slow: dict[tuple[str, str], float] | None = None) -> list[str]:
    """Names of the metrics that the gate finds slower in run `b`."""
    found = compare(simulated(a), simulated(b, slow=slow))
    return [change.name for change in found.changes if change.verdict == "slower"]


@pytest.mark.slow
def test_equal_runs_compare_clean() -> None:
    clean = sum(slower(100 + i, 200 + i) == [] for i in range(TRIES))
    assert clean >= 19


@pytest.mark.slow
def test_a_metric_that_is_a_fifth_slower_is_named() -> None:
    found = 0
    for i in range(TRIES):
        name = f"room{i % METRICS}/seconds"
        found += slower(300 + i, 400 + i, {("", name): 1.2}) == [name]
    assert found >= 18


def in_processes(seed: int, slow: float = 1.0, known: bool = True) -> Result:
    """One metric of five processes: 4% from process to process, 1% within one."""
    draw = np.random.default_rng(seed)
    costs = np.exp(draw.normal(0.0, 0.04, (5, 1)) + draw.normal(0.0, 0.01, (5, 9))).ravel() * slow
    limit = Reference("a copy", (1.0,) * costs.size)
    metric = Metric(
        "copy", "copy/seconds", "s", "lower", tuple(costs), limit, processes=5 if known else 1
    )
    return replace(simulated(1), metrics=(metric,))


@pytest.mark.slow
def test_what_differs_between_processes_of_equal_code_is_no_change() -> None:
    def alarms(known: bool) -> int:
        pairs = [
            (in_processes(700 + i, known=known), in_processes(800 + i, known=known))
            for i in range(5 * TRIES)
        ]
        return sum(compare(one, other).changes[0].verdict == "slower" for one, other in pairs)

    assert alarms(known=True) <= 5 and alarms(known=True) < alarms(known=False)
    found = [
        compare(in_processes(700 + i), in_processes(900 + i, slow=1.2)).changes[0]
        for i in range(5 * TRIES)
    ]
    assert sum(change.verdict == "slower" for change in found) >= 90


def test_medians_of_the_values_alone_would_raise_false_alarms() -> None:
    """Without ratios the same runs differ by more than a tenth in many tries."""
    alarms = 0
    for i in range(TRIES):
        first = simulated(100 + i)
        second = simulated(200 + i)
        pairs = zip(first.metrics, second.metrics, strict=True)
        alarms += any(other.value / one.value > 1.1 for one, other in pairs)
    assert alarms >= TRIES // 4


@pytest.mark.slow
def test_equal_nodes_do_not_stand_out() -> None:
    assert sum(outliers(simulated(500 + i, NODES)) == () for i in range(TRIES)) >= 19


@pytest.mark.slow
def test_one_of_four_nodes_that_is_a_fifth_slower_is_named() -> None:
    found = 0
    for i in range(TRIES):
        node = NODES[i % 4]
        slow = {(node, f"room{number}/seconds"): 1.2 for number in range(METRICS)}
        named = outliers(simulated(600 + i, NODES, slow))
        found += bool(named) and {outlier.node for outlier in named} == {node}
    assert found >= 18


def test_of_two_nodes_the_slower_one_is_named() -> None:
    slow = {("n2", "room3/seconds"): 1.3}
    assert [(o.node, o.name) for o in outliers(simulated(7, ("n1", "n2"), slow))] == [
        ("n2", "room3/seconds")
    ]


def test_a_faster_run_passes_and_a_missing_metric_does_not() -> None:
    first = simulated(1)
    faster = compare(first, simulated(2, slow={("", "room1/seconds"): 0.7}))
    assert [c.name for c in faster.changes if c.verdict == "faster"] == [
        "room1/seconds"
    ] and faster.exit_code == 0
    fewer = compare(first, replace(first, metrics=first.metrics[1:]))
    assert fewer.exit_code == 1 and fewer.changes[0].verdict == "only in A"
    assert compare(replace(first, metrics=first.metrics[1:]), first).exit_code == 0


def test_other_hardware_is_said_and_not_judged() -> None:
    first = simulated(1)
    print_of = fingerprint_of({"cores": 8, "memory_gib": 24.0, "accelerators": []})
    found = compare(
        first, replace(simulated(2, slow={("", "room1/seconds"): 2.0}), fingerprint=print_of)
    )
    assert found.exit_code == 3 and found.differences["hardware"] == ["cores: 2 → 8"]
    assert {change.verdict for change in found.changes} == {"not judged"}


def test_other_software_is_said_and_judged() -> None:
    first = simulated(1)
    software = {**first.fingerprint, "software": {"packages": {"torch": "2.0"}}}
    found = compare(first, replace(first, fingerprint=software))
    assert found.exit_code == 0 and "packages.torch: None → 2.0" in found.differences["software"]


@pytest.mark.parametrize(
    ("value", "verdict"), [(100, "same"), (104, "same"), (106, "slower"), (90, "faster")]
)
def test_counts_are_compared_as_they_are(value: float, verdict: str) -> None:
    first = replace(
        simulated(1), metrics=(Metric("plan", "plan/slices", "count", "lower", (100.0,)),)
    )
    second = replace(first, metrics=(Metric("plan", "plan/slices", "count", "lower", (value,)),))
    assert [change.verdict for change in compare(first, second).changes] == [verdict]


def test_without_a_reference_or_with_few_rounds_nothing_is_judged() -> None:
    rounds = (1.0, 1.1, 1.2, 1.3, 1.4)
    bare = Metric("x", "bare/seconds", "s", "lower", rounds)
    few = Metric("x", "few/seconds", "s", "lower", (1.0, 1.1), Reference("copy", (1.0, 1.0)))
    first = replace(simulated(1), metrics=(bare, few))
    found = compare(first, first).changes
    assert [change.verdict for change in found] == ["not judged"] * 2
    assert "no reference was measured" in found[0].why and "5 are required" in found[1].why


def test_higher_is_better_for_rates() -> None:
    def run(factor: float, seed: int) -> Metric:
        base = simulated(seed).metrics[0]
        assert base.limit is not None
        rates = tuple(factor / one for one in base.rounds)
        limit = Reference("copy", tuple(1 / one for one in base.limit.rounds))
        return replace(base, unit="GB/s", better="higher", rounds=rates, limit=limit)

    first, second = (replace(simulated(1), metrics=(run(*pair),)) for pair in ((1.0, 1), (0.75, 2)))
    assert [c.verdict for c in compare(first, second).changes] == ["slower"]
    assert [c.verdict for c in compare(second, first).changes] == ["faster"]


def test_the_answer_is_the_same_each_time_and_lies_between_its_ends() -> None:
    import numpy as np

    values = np.random.default_rng(0).normal(0.1, 0.1, 30)
    first = interval(values, np.zeros(1), 0.01, seed=3)
    assert first == interval(values, np.zeros(1), 0.01, seed=3)
    assert first[0] < first[1] < first[2]
    assert interval(values, np.zeros(1), 0.2, seed=3)[0] > first[0]
