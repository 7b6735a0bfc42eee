"""How often the gate is right on this machine: runs of equal code that compare clean, and slowdowns of a fifth that are
found and named, of a metric and of one of four processes that stand for nodes.

`make bench NAME=gate ARGS="--tries 20"`. Each try takes two neighbouring real runs. The slowdown is put into the rounds
of the second: every round of one metric, or of all metrics of one node, is a fifth slower than it was measured.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hybridflow.bench.files import load
from hybridflow.bench.gate import Comparison, compare, outliers
from hybridflow.bench.result import Metric, Result
from hybridflow.bench.run import Job, run
from support.report import Figure, write

SLOWDOWN = 1.2
PARTS = ("advantages", "columns", "compute", "log_probs", "packing", "planner")
ON_NODES, NODES = "compute", ("n1", "n2", "n3", "n4")


def quiet(_: str) -> None:
    """Say nothing about a measurement that went well."""


def run_parts(folder: Path, parts: Sequence[str]) -> Result:
    """One run of all measurements."""
    found = [run(Job(part, folder / part), quiet) for part in parts]
    return replace(found[0], metrics=tuple(metric for one in found for metric in one.metrics))


def run_nodes(folder: Path) -> Result:
    """One run of four processes at the same time, as four nodes."""
    with ThreadPoolExecutor(len(NODES)) as threads:
        list(threads.map(lambda node: run(Job(ON_NODES, folder, node, NODES), quiet), NODES))
    return load(folder)


def slowed(result: Result, *, name: str | None = None, node: str | None = None) -> Result:
    """The result with all rounds of one metric, or of one node, a fifth slower."""

    def changed(metric: Metric) -> Metric:
        if (name is not None and metric.name != name) or (node is not None and metric.node != node):
            return metric
        factor = SLOWDOWN if metric.better == "lower" else 1 / SLOWDOWN
        return replace(metric, rounds=tuple(value * factor for value in metric.rounds))

    return replace(result, metrics=tuple(map(changed, result.metrics)))


def slower(found: Comparison) -> list[str]:
    """The metrics that the gate calls slower."""
    return [change.name for change in found.changes if change.verdict in ("slower", "only in A")]


def main() -> None:
    """All figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--part", action="append", help="a measurement; may be given again; default: all without Ray")
    given = parser.parse_args()
    draw, parts = random.Random(0), given.part or PARTS
    clean = named = unclear = judged = nodes_clean = nodes_named = 0
    with tempfile.TemporaryDirectory() as name:
        before = run_parts(Path(name, "0"), parts)
        for at in range(given.tries):
            after = run_parts(Path(name, str(at + 1)), parts)
            found = compare(before, after)
            clean += slower(found) == []
            can_be_judged = [change.name for change in found.changes if change.verdict != "not judged"]
            judged += len(can_be_judged)
            unclear += sum(change.verdict == "unclear" for change in found.changes)
            target = draw.choice(can_be_judged)
            told = slower(compare(before, slowed(after, name=target)))
            named += told == [target]
            print(f"try {at + 1}: {slower(found) or 'clean'}; {target} slowed: {told or 'not found'}", flush=True)
            before = after
        for at in range(given.tries):
            nodes = run_nodes(Path(name, f"nodes-{at}"))
            nodes_clean += outliers(nodes) == ()
            target = NODES[at % len(NODES)]
            stand_out = {outlier.node for outlier in outliers(slowed(nodes, node=target))}
            nodes_named += stand_out == {target}
            print(f"try {at + 1}: {target} slowed: {sorted(stand_out) or 'not found'}", flush=True)
    shares = {
        "runs of equal code that compare clean": clean,
        "a metric slowed by a fifth is found and it alone named": named,
        "equal nodes of which none stands out": nodes_clean,
        "one of four nodes slowed by a fifth is found and it alone named": nodes_named,
    }
    figures = [Figure(text, count, f"of {given.tries}") for text, count in shares.items()]
    figures.append(Figure("metrics that are unclear in a comparison", unclear / max(judged, 1), "share"))
    write("gate", figures, {"measurements": list(parts), "slowdown": SLOWDOWN, "nodes": f"{len(NODES)} processes"})


if __name__ == "__main__":
    main()
