"""Formats results as text: a table for a terminal, and a file for Prometheus' node exporter."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.bench.gate import Comparison, Outlier, outliers
from hybridflow.bench.result import Metric, Reference, Result

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
    return "" if value is None else f"{value:.4g}"


def row(metric: Metric) -> tuple[str, ...]:
    """Return the cells of a metric's row in the table."""
    share = metric.share
    ratio = metric.ratio
    return (
        metric.name,
        metric.node,
        number(metric.value),
        metric.unit,
        f"{metric.spread:.1%}",
        "" if share is None else f"{share:.0%}",
        _name(metric.limit),
        "" if ratio is None else f"{ratio:.2f} x",
        _name(metric.peer),
    )


def table(result: Result) -> str:
    """Format the result for a terminal: metrics, gaps, findings, and outlier nodes."""
    nodes = ", ".join(result.nodes) or "one node"
    lines = [f"{result.suite}, {result.started}, {result.seconds:.0f} s, {nodes}", ""]
    lines += _aligned([COLUMNS, *map(row, result.metrics)])
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
        interval = ""
        if one.low is not None and one.high is not None:
            interval = f"{one.low:+.1%} to {one.high:+.1%}"
        rows.append(
            (
                one.name,
                one.node,
                number(one.first),
                number(one.second),
                one.unit,
                "" if one.change is None else f"{one.change:+.1%}",
                interval,
                f"{one.bound:.0%}",
                f"{one.verdict} ({one.why})" if one.why else one.verdict,
            )
        )
    lines += ["", *_aligned(rows), *map(sentence, found.outliers), "", verdict(found)]
    return "\n".join(lines).lstrip("\n")


def verdict(found: Comparison) -> str:
    """Return the verdict as one line: passed, or the slower metrics and their nodes."""
    if not found.same_hardware:
        return (
            "not judged: A and B ran on different hardware; create a baseline on this hardware "
            "(hybridflow bench baseline)"
        )
    by_verdict: dict[str, list[str]] = {}
    for change in found.changes:
        by_verdict.setdefault(change.verdict, []).append(_on(change.name, change.node))
    bad = {
        "slower": by_verdict.get("slower"),
        "missing": by_verdict.get("only in A"),
        "nodes that stand out": sorted({outlier.node for outlier in found.outliers}),
    }
    said = [f"{what}: {', '.join(names)}" for what, names in bad.items() if names]
    judged = sum(len(by_verdict.get(name, ())) for name in ("same", "slower", "faster"))
    unclear = len(by_verdict.get("unclear", ()))
    quiet = (
        f"; {unclear} unclear: repeat both runs on a quieter machine" if unclear else ""
    )
    if said:
        return f"failed; {'; '.join(said)}{quiet}"
    return f"passed: {judged} metrics judged, none slower{quiet}"


def prometheus(result: Result) -> str:
    """Format values, shares and outlier nodes for the node exporter's textfile collector."""
    shares = [(one, one.share) for one in result.metrics]
    families: dict[str, list[tuple[Metric | Outlier, float]]] = {
        "value": [(one, one.value) for one in result.metrics],
        "share": [(one, share) for one, share in shares if share is not None],
        "node_excess": [(one, one.excess) for one in outliers(result)],
    }
    lines = []
    for family, samples in families.items():
        name = f"hybridflow_bench_{family}"
        lines += [f"# HELP {name} {_HELP[family]}", f"# TYPE {name} gauge"]
        for one, value in samples:
            labels = {"suite": result.suite, "metric": one.name, "node": one.node}
            if family != "node_excess":
                labels["unit"] = one.unit
            pairs = [f'{key}="{_escaped(text)}"' for key, text in labels.items()]
            lines.append(f"{name}{{{','.join(pairs)}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _name(reference: Reference | None) -> str:
    return reference.name if reference else ""


def _on(name: str, node: str) -> str:
    return f"{name} on {node}" if node else name


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad each column to a common width. Empty columns are omitted."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
