"""Formats results as text: a table for a terminal, and a file for Prometheus' node exporter."""

from __future__ import annotations

from collections import defaultdict

from hybridflow.bench.gate import Comparison, Outlier, outliers
from hybridflow.bench.result import Metric, Result
from hybridflow.observe.exporter import Sample, exposition
from hybridflow.observe.text_table import aligned, filled

COLUMNS = (
    "metric",
    "node",
    "value",
    "unit",
    "spread",
    "of the limit",
    "limit",
    "against the peer",
    "peer",
)
NUMBERS = (
    "value",
    "spread",
    "of the limit",
    "against the peer",
)  # columns with numbers
_COMPARED = ("metric", "node", "A", "B", "unit", "cost", "interval", "bound", "verdict")
_HELP = {
    "value": "Median of a benchmark metric, in the metric's unit.",
    "share": "Share of the limit that a metric achieves.",
    "node_excess": "By how much an outlier node is worse than the other nodes.",
}


def number(value: float | None) -> str:
    """Format a number with four digits; empty for None."""
    return _formatted("{:.4g}", value)


def row(metric: Metric) -> tuple[str, ...]:
    """Return the cells of a metric's row in the table."""
    return (
        metric.name,
        metric.node,
        number(metric.value),
        metric.unit,
        f"{metric.spread:.1%}",
        _formatted("{:.0%}", metric.share),
        metric.limit.name if metric.limit else "",
        _formatted("{:.2f} x", metric.ratio),
        metric.peer.name if metric.peer else "",
    )


def table(result: Result) -> str:
    """Format the result for a terminal: metrics, gaps, findings, and outlier nodes."""
    nodes = ", ".join(result.nodes) or "one node"
    lines = [f"{result.suite}, {result.started}, {result.seconds:.0f} s, {nodes}", ""]
    lines += aligned(filled([COLUMNS, *map(row, result.metrics)]))
    for gap in result.not_run:
        lines.append(f"not run: {_on(gap.measurement, gap.node)}: {gap.why}")
    for one in result.findings:
        lines.append(f"{one['level']}: {_on(one['name'], one['node'])}: {one['what']}")
    return "\n".join([*lines, *map(sentence, outliers(result))])


def sentence(outlier: Outlier) -> str:
    """Return a sentence that describes how an outlier node differs from the others."""
    return (
        f"node {outlier.node} stands out: {outlier.name} is {outlier.excess:.0%} worse than on the "
        f"other nodes ({number(outlier.value)} against {number(outlier.others)} {outlier.unit}; "
        f"bound {outlier.bound:.0%})"
    )


def compared(found: Comparison) -> str:
    """Format the comparison for a terminal. The verdict is the last line."""
    lines = []
    for part, words in found.differences.items():
        more = " ..." if len(words) > 6 else ""
        lines.append(f"other {part}: {'; '.join(words[:6])}{more}")
    rows = [_COMPARED]
    for one in found.changes:
        rows.append(
            (
                one.name,
                one.node,
                number(one.first),
                number(one.second),
                one.unit,
                _formatted("{:+.1%}", one.change),
                _formatted("{:+.1%} to {:+.1%}", one.low, one.high),
                f"{one.bound:.0%}",
                f"{one.verdict} ({one.why})" if one.why else one.verdict,
            )
        )
    lines += ["", *aligned(filled(rows)), *map(sentence, found.outliers), ""]
    return "\n".join([*lines, verdict(found)]).lstrip("\n")


def verdict(found: Comparison) -> str:
    """Return the verdict as one line: passed, or the slower metrics and their nodes."""
    if not found.same_hardware:
        return (
            "not judged: A and B ran on different hardware; create a baseline on this hardware "
            "(hybridflow bench baseline)"
        )
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for change in found.changes:
        by_verdict[change.verdict].append(_on(change.name, change.node))
    bad = {
        "slower": by_verdict["slower"],
        "missing": by_verdict["only in A"],
        "nodes that stand out": sorted({outlier.node for outlier in found.outliers}),
    }
    said = [f"{what}: {', '.join(names)}" for what, names in bad.items() if names]
    quiet = ""
    if unclear := len(by_verdict["unclear"]):
        quiet = f"; {unclear} unclear: repeat both runs on a quieter machine"
    if said:
        return f"failed; {'; '.join(said)}{quiet}"
    judged = len(by_verdict["same"] + by_verdict["faster"])
    return f"passed: {judged} metrics judged, none slower{quiet}"


def prometheus(result: Result) -> str:
    """Format values, shares and outlier nodes for the node exporter's textfile collector."""
    samples: list[Sample] = []

    def add(family: str, value: float | None, **labels: str) -> None:
        if value is not None:
            name = f"hybridflow_bench_{family}"
            samples.append(
                (name, _HELP[family], {"suite": result.suite, **labels}, value)
            )

    for one in result.metrics:
        labels = {"metric": one.name, "node": one.node, "unit": one.unit}
        add("value", one.value, **labels)
        add("share", one.share, **labels)
    for outlier in outliers(result):
        add("node_excess", outlier.excess, metric=outlier.name, node=outlier.node)
    return exposition(samples)


def _formatted(form: str, *values: float | None) -> str:
    """Format the values; empty if one is None."""
    return "" if None in values else form.format(*values)


def _on(name: str, node: str) -> str:
    return f"{name} on {node}" if node else name
