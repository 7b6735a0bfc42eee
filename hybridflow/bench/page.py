"""A self-contained HTML page that shows the last run of a suite, the history of each metric, and
outlier nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from markupsafe import Markup

from hybridflow.bench import show
from hybridflow.bench.gate import outliers
from hybridflow.bench.measurements.base import SUITES
from hybridflow.bench.result import Result, differences, flat
from hybridflow.observe.charts import Chart, Drawn, Point, Series, draw
from hybridflow.observe.templates import fill
from hybridflow.observe.text_table import filled


def page(results: Sequence[Result]) -> str:
    """Return the page for `results`, which must be sorted oldest first. The tables show the last
    run.
    """
    last = results[-1]
    worse = outliers(last)
    rows = [show.row(metric) for metric in last.metrics if not metric.node]
    return fill(
        "bench",
        results=results,
        about=SUITES.get(last.suite, ""),
        table=filled([show.COLUMNS, *rows]),
        # of the metrics that nodes have in common, by name and node
        units={one.name: one.unit for one in last.metrics if one.node},
        metrics={(one.name, one.node): one for one in last.metrics},
        worse={(one.name, one.node): one for one in worse},
        fingerprint=flat(last.fingerprint),
        pairs=list(pairwise(results)),
        differences=differences,
        charts=_history(results) if len(results) > 1 else [],
        show=show,
    )


def _history(results: Sequence[Result]) -> list[Drawn]:
    """Draw each metric over all runs: as a share of its limit if it has one, otherwise as a
    value."""
    lines: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for turn, result in enumerate(results, 1):
        for metric in result.metrics:
            value = metric.value
            unit = metric.unit
            if metric.share is not None:
                value = metric.share
                unit = "share of the limit"
            nodes = lines.setdefault((metric.name, unit), {})
            nodes.setdefault(metric.node or "value", []).append((float(turn), value))
    charts = []
    for (name, unit), nodes in lines.items():
        series = []
        for index, node in enumerate(nodes):
            series.append(Series(node, nodes[node], index % 8))
        if drawn := draw(Chart(name, series, unit)):
            # the axis of these charts counts runs
            svg = Markup(drawn.svg.replace(">step<", ">run<"))
            charts.append(replace(drawn, svg=svg))
    return charts
