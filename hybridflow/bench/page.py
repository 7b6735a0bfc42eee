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
    metrics = {(metric.name, metric.node): metric for metric in last.metrics}
    worse = {(outlier.name, outlier.node): outlier for outlier in outliers(last)}
    rows = [show.row(metric) for metric in last.metrics if not metric.node]
    # of the metrics that nodes have in common
    units = {metric.name: metric.unit for metric in last.metrics if metric.node}
    return fill(
        "bench",
        results=results,
        about=SUITES.get(last.suite, ""),
        table=filled([show.COLUMNS, *rows]),
        units=units,
        metrics=metrics,
        worse=worse,
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
            points = nodes.setdefault(metric.node or "value", [])
            points.append((float(turn), value))
    charts = []
    for (name, unit), nodes in lines.items():
        series = []
        for index, (node, points) in enumerate(nodes.items()):
            series.append(Series(node, points, index % 8))
        drawn = draw(Chart(name, series, unit))
        if drawn is not None:
            # the axis of these charts counts runs
            svg = Markup(drawn.svg.replace(">step<", ">run<"))
            charts.append(replace(drawn, svg=svg))
    return charts
