"""Measures the reliability of the gate on this machine: identical runs must pass, and slowdowns
must be detected.

Each trial compares two consecutive real runs. A slowdown is injected into the second run by making
all rounds of one metric, or of all metrics of one node, 20% slower than measured. Four concurrent
processes represent four nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hybridflow.bench.files import load
from hybridflow.bench.gate import compare, outliers
from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, Result, measured
from hybridflow.bench.run import Job, run

SLOWDOWN = 1.2
PARTS = "advantages,columns,compute,log_probs,packing,planner"
ON_NODES = "compute"
NODES = ("n1", "n2", "n3", "n4")


@measurement("gate", timeout_s=86_400)
def gate(place: Place, tries: int = 20, parts: str = PARTS) -> Iterator[Metric]:
    """number of identical runs that pass the gate, and of 20% slowdowns that it detects"""
    draw = random.Random(0)
    found = Counter[str]()
    before = _run_parts(place.local / "0", parts)
    for number in range(1, tries + 1):
        after = _run_parts(place.local / str(number), parts)
        changes = compare(before, after).changes
        judged = [change for change in changes if change.verdict != "not judged"]
        target = draw.choice(judged).name
        named = compare(before, _slowed(after, target, "")).slower
        found["judged"] += len(judged)
        found["unclear"] += sum(change.verdict == "unclear" for change in judged)
        found["equal runs that compare clean"] += not compare(before, after).slower
        found["metrics slowed by a fifth that alone are named"] += named == [target]
        nodes = _run_nodes(place.local / f"nodes-{number}")
        node = NODES[number % len(NODES)]
        outside = {outlier.node for outlier in outliers(_slowed(nodes, "", node))}
        found["equal nodes of which none stands out"] += outliers(nodes) == ()
        found["nodes slowed by a fifth that alone are named"] += outside == {node}
        print(f"try {number}: {target}: {named}, {node}: {sorted(outside)}", flush=True)
        before = after
    share = found.pop("unclear") / max(found.pop("judged"), 1)
    yield measured("metrics that are unclear", "share", share, "lower")
    for name, count in found.items():
        yield measured(name, f"of {tries}", count, "higher")


def _quiet(_: str) -> None:
    """Suppress the output line of each entry."""


def _run_parts(folder: Path, parts: str) -> Result:
    """Run all entries once."""
    first, *others = [
        run(Job(part, folder / part), _quiet) for part in parts.split(",")
    ]
    return first.joined(others)


def _run_nodes(folder: Path) -> Result:
    """Run four concurrent processes that represent four nodes."""
    with ThreadPoolExecutor(len(NODES)) as threads:
        list(
            threads.map(
                lambda node: run(Job(ON_NODES, folder, node, NODES), _quiet), NODES
            )
        )
    return load(folder)


def _slowed(result: Result, name: str, node: str) -> Result:
    """Return the result after making all rounds of a metric, or of a node, 20% slower."""

    def slower(metric: Metric) -> Metric:
        if name not in ("", metric.name) or node not in ("", metric.node):
            return metric
        factor = SLOWDOWN if metric.better == "lower" else 1 / SLOWDOWN
        return replace(metric, rounds=tuple(value * factor for value in metric.rounds))

    return replace(result, metrics=tuple(map(slower, result.metrics)))
