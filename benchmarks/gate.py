"""Measures the reliability of the gate on this machine: identical runs must pass, and slowdowns
must be detected.

Each trial compares two consecutive real runs. A slowdown is injected into the second run by making
all rounds of one metric, or of all metrics of one node, 20% slower than measured. Four concurrent
processes represent four nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hybridflow.bench.files import load
from hybridflow.bench.gate import compare, outliers
from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import Result, measured
from hybridflow.bench.run import Job, run

SLOWDOWN = 1.2
PARTS = "advantages,columns,compute,log_probs,packing,planner"
ON_NODES = "compute"
NODES = ("n1", "n2", "n3", "n4")


@measurement("gate", timeout_s=86_400)
def gate(place: Place, tries: int = 20, parts: str = PARTS) -> Yields:
    """number of identical runs that pass the gate, and of 20% slowdowns that it detects"""
    draw = random.Random(0)
    found = Counter[str]()
    before = _run_parts(place.local / "0", parts)
    for number in range(1, tries + 1):
        after = _run_parts(place.local / str(number), parts)
        equal = compare(before, after)
        judged = [one for one in equal.changes if one.verdict != "not judged"]
        target = draw.choice(judged).name
        named = compare(before, _slowed(after, target, "")).slower
        found["judged"] += len(judged)
        found["unclear"] += sum(one.verdict == "unclear" for one in judged)
        found["equal runs that compare clean"] += not equal.slower
        found["metrics slowed by a fifth that alone are named"] += named == [target]
        nodes = _run_nodes(place.local / f"nodes-{number}")
        node = NODES[number % len(NODES)]
        outside = {one.node for one in outliers(_slowed(nodes, "", node))}
        found["equal nodes of which none stands out"] += not outliers(nodes)
        found["nodes slowed by a fifth that alone are named"] += outside == {node}
        print(f"try {number}: {target}: {named}, {node}: {sorted(outside)}", flush=True)
        before = after
    unclear = found.pop("unclear") / found.pop("judged")
    yield measured("metrics that are unclear", "share", unclear, "lower")
    for name, count in found.items():
        yield measured(name, f"of {tries}", count, "higher")


def _run_parts(folder: Path, parts: str) -> Result:
    """Run all entries once."""
    first, *others = [run(Job(part, folder / part)) for part in parts.split(",")]
    return first.joined(others)


def _run_nodes(folder: Path) -> Result:
    """Run four concurrent processes that represent four nodes."""
    jobs = [Job(ON_NODES, folder, node, NODES) for node in NODES]
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(run, jobs))
    return load(folder)


def _slowed(result: Result, name: str, node: str) -> Result:
    """Return the result after making all rounds of a metric, or of a node, 20% slower."""
    metrics = []
    for metric in result.metrics:
        rounds = metric.rounds
        if name in ("", metric.name) and node in ("", metric.node):
            factor = SLOWDOWN if metric.better == "lower" else 1 / SLOWDOWN
            rounds = tuple(value * factor for value in rounds)
        metrics.append(replace(metric, rounds=rounds))
    return replace(result, metrics=tuple(metrics))
