"""One self-contained HTML page: the last run of a suite, the history of each metric, and nodes that stand out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import jinja2
from markupsafe import Markup

from hybridflow.bench import show
from hybridflow.bench.gate import outliers
from hybridflow.bench.measurements.base import SUITES
from hybridflow.bench.result import Result, differences
from hybridflow.observe.charts import Chart, Drawn, Series, draw


def page(results: Sequence[Result]) -> str:
    """The page of several runs, oldest first; tables are of the last one."""
    last = results[-1]
    environment = jinja2.Environment(loader=jinja2.PackageLoader("hybridflow.bench", "."), autoescape=True)
    found = outliers(last)
    names = list(dict.fromkeys(metric.name for metric in last.metrics))
    cells = {(one.name, one.node): one for one in last.metrics}
    worse = {(one.name, one.node): one for one in found}
    rows = [show.row(metric) for metric in last.metrics if not metric.node]
    shown = [any(row[place] for row in rows) for place in range(len(show.COLUMNS))]  # empty columns are left out
    return environment.get_template("page.html.j2").render(
        last=last,
        about=SUITES.get(last.suite, ""),
        count=len(results),
        columns=[column for column, kept in zip(show.COLUMNS, shown, strict=True) if kept],
        rows=[[cell for cell, kept in zip(row, shown, strict=True) if kept] for row in rows],
        nodes=last.nodes,
        by_node=[
            (name, _unit(last, name), [(cells.get((name, node)), worse.get((name, node))) for node in last.nodes])
            for name in names
            if any((name, node) in cells for node in last.nodes)
        ],
        outliers=[show.sentence(one) for one in found],
        fingerprint=_facts(last),
        changed=[(one.started, differences(before, one)) for before, one in pairwise(results)],
        charts=_history(results) if len(results) > 1 else [],
        number=show.number,
    )


def _unit(result: Result, name: str) -> str:
    return next(metric.unit for metric in result.metrics if metric.name == name)


def _facts(result: Result) -> list[tuple[str, str]]:
    hardware, software = result.fingerprint["hardware"], result.fingerprint["software"]
    packages = ", ".join(f"{name} {version}" for name, version in (software.get("packages") or {}).items())
    commit = result.fingerprint["commit"] or {}
    modified = ", with changes that are not committed" if commit.get("modified") else ""
    facts = [
        ("processor", f"{hardware.get('processor') or 'unknown'}, {hardware.get('cores')} cores"),
        ("memory", f"{hardware.get('memory_gib')} GiB"),
        ("accelerators", ", ".join(hardware.get("accelerators") or []) or "none"),
        ("system", f"{software.get('platform')}, Python {software.get('python')}"),
        ("packages", packages),
        ("commit", f"{commit.get('commit') or 'unknown'}{modified}"),
        ("recipe", result.fingerprint["recipe"] or "none"),
        ("nodes", ", ".join(result.fingerprint["placement"]["nodes"]) or "this machine"),
    ]
    return [(name, str(value)) for name, value in facts]


def _history(results: Sequence[Result]) -> list[Drawn]:
    """A chart of each metric over the runs: its share of the limit where it has one, else its value."""
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float | None]]]] = defaultdict(lambda: defaultdict(list))
    for turn, result in enumerate(results, 1):
        for metric in result.metrics:
            value, unit = (metric.value, metric.unit) if metric.share is None else (metric.share, "share of the limit")
            lines[metric.name, unit][metric.node or "value"].append((float(turn), value))
    drawn = [
        draw(Chart(name, [Series(node, points, place % 8) for place, (node, points) in enumerate(nodes.items())], unit))
        for (name, unit), nodes in lines.items()
    ]
    # the axis of these charts counts runs
    return [replace(one, svg=Markup(one.svg.replace(">step<", ">run<"))) for one in drawn if one is not None]
