"""A result as text: a table for a terminal, CSV, markdown, and a file for Prometheus' node exporter."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from hybridflow.bench.gate import Comparison, Outlier, outliers
from hybridflow.bench.result import Metric, Reference, Result

COLUMNS = ("metric", "node", "value", "unit", "spread", "of the limit", "limit", "against the peer", "peer")


def number(value: float | None) -> str:
    """Four digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def row(metric: Metric) -> tuple[str, ...]:
    """The columns of a metric."""
    share = "" if metric.share is None else f"{metric.share:.0%}"
    ratio = "" if metric.ratio is None else f"{metric.ratio:.2f} x"
    return (
        metric.name, metric.node, number(metric.value), metric.unit, f"{metric.spread:.1%}", share,
        _name(metric.limit), ratio, _name(metric.peer),
    )  # fmt: skip


def table(result: Result) -> str:
    """The result for a terminal: metrics, what was not run, findings, and nodes that stand out."""
    rows = [COLUMNS, *map(row, result.metrics)]
    nodes = ", ".join(result.nodes) or "one node"
    lines = [f"{result.suite}, {result.started}, {result.seconds:.0f} s, {nodes}", "", *_aligned(rows)]
    return "\n".join([*lines, *_not_run_and_found(result), *map(sentence, outliers(result))])


def _not_run_and_found(result: Result) -> list[str]:
    lines = [f"not run: {_on(entry.measurement, entry.node)}: {entry.why}" for entry in result.not_run]
    return lines + [f"{one['level']}: {_on(one['name'], one['node'])}: {one['what']}" for one in result.findings]


def sentence(outlier: Outlier) -> str:
    """What a node that stands out does worse than the others."""
    return (
        f"node {outlier.node} stands out: {outlier.name} is {outlier.excess:.0%} worse than the other nodes' "
        f"({number(outlier.value)} against {number(outlier.others)} {outlier.unit}; bound {outlier.bound:.0%})"
    )


def compared(found: Comparison) -> str:
    """The comparison for a terminal: what differs around it, each metric, and the verdict on the last line."""
    lines = []
    for part, words in found.differences.items():
        lines.append(f"other {part}: {'; '.join(words[:6])}{' ...' if len(words) > 6 else ''}")
    head = ("metric", "node", "A", "B", "unit", "cost", "interval", "bound", "verdict")
    rows = [head]
    for change in found.changes:
        shown = "" if change.change is None else f"{change.change:+.1%}"
        between = "" if change.low is None or change.high is None else f"{change.low:+.1%} to {change.high:+.1%}"
        why = f" ({change.why})" if change.why else ""
        rows.append(
            (change.name, change.node, number(change.first), number(change.second), change.unit, shown, between,
             f"{change.bound:.0%}", f"{change.verdict}{why}")
        )  # fmt: skip
    lines += ["", *_aligned(rows), *map(sentence, found.outliers), "", verdict(found)]
    return "\n".join(lines).lstrip("\n")


def verdict(found: Comparison) -> str:
    """One line: passed, or what is slower and where."""
    if not found.same_hardware:
        return "not judged: A and B are of other hardware; take a baseline on this one (hybridflow bench baseline)"
    slow = [_on(change.name, change.node) for change in found.changes if change.verdict == "slower"]
    lost = [_on(change.name, change.node) for change in found.changes if change.verdict == "only in A"]
    nodes = sorted({outlier.node for outlier in found.outliers})
    said = [f"slower: {', '.join(slow)}"] if slow else []
    said += [f"missing: {', '.join(lost)}"] if lost else []
    said += [f"nodes that stand out: {', '.join(nodes)}"] if nodes else []
    judged = sum(change.verdict in ("same", "slower", "faster") for change in found.changes)
    unclear = sum(change.verdict == "unclear" for change in found.changes)
    quiet = f"; {unclear} unclear: repeat both on a quieter machine" if unclear else ""
    return (f"failed; {'; '.join(said)}" if said else f"passed: {judged} metrics judged, none is slower") + quiet


def as_csv(results: Sequence[Result]) -> str:
    """One line a metric and run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ("suite", "started", "commit", "measurement", "metric", "node", "unit", "better", "value", "spread")
    writer.writerow((*head, "rounds", "limit", "share", "peer", "peer_value", "ratio"))
    for result in results:
        commit = (result.fingerprint.get("commit") or {}).get("commit", "")
        for metric in result.metrics:
            peer = metric.peer.value if metric.peer else ""
            writer.writerow(
                (result.suite, result.started, commit, metric.measurement, metric.name, metric.node, metric.unit,
                 metric.better, metric.value, metric.spread, len(metric.rounds),
                 metric.limit.value if metric.limit else "", metric.share, _name(metric.peer), peer, metric.ratio)
            )  # fmt: skip
    return out.getvalue()


def markdown(result: Result) -> str:
    """A table, and lists of what was not run and found."""
    lines = [f"# {result.suite}, {result.started}", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(metric)) + " |" for metric in result.metrics]
    ends = [*map(sentence, outliers(result)), *_not_run_and_found(result)]
    return "\n".join([*lines, "", *(f"- {line}" for line in ends)]).rstrip() + "\n"


def prometheus(result: Result) -> str:
    """Text for the node exporter's textfile collector: values, shares of limits, and nodes that stand out."""
    lines = [
        "# HELP hybridflow_bench_value Median of a metric of a benchmark suite, in its own unit.",
        "# TYPE hybridflow_bench_value gauge",
    ]
    lines += [f"hybridflow_bench_value{_labels(result, one)} {one.value!r}" for one in result.metrics]
    shares = [one for one in result.metrics if one.share is not None]
    lines += [
        "# HELP hybridflow_bench_share Part of the limit that a metric reaches.",
        "# TYPE hybridflow_bench_share gauge",
        *(f"hybridflow_bench_share{_labels(result, one)} {one.share!r}" for one in shares),
        "# HELP hybridflow_bench_node_excess How much worse than the other nodes a node is that stands out.",
        "# TYPE hybridflow_bench_node_excess gauge",
    ]
    lines += [
        f'hybridflow_bench_node_excess{{suite="{_escaped(result.suite)}",metric="{_escaped(one.name)}",'
        f'node="{_escaped(one.node)}"}} {one.excess!r}'
        for one in outliers(result)
    ]
    return "\n".join(lines) + "\n"


def _labels(result: Result, metric: Metric) -> str:
    labels = {"suite": result.suite, "metric": metric.name, "unit": metric.unit, "node": metric.node}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _name(reference: Reference | None) -> str:
    return reference.name if reference else ""


def _on(name: str, node: str) -> str:
    return f"{name} on {node}" if node else name


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    kept = [place for place in range(len(rows[0])) if any(row[place] for row in rows[1:])]
    widths = {place: max(len(row[place]) for row in rows) for place in kept}
    return ["  ".join(row[place].ljust(widths[place]) for place in kept).rstrip() for row in rows]
