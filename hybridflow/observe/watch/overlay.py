"""Comparison of two runs: their figures, the settings that differ, and their curves in shared
charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridflow.observe.charts import Chart, Drawn, Series, draw
from hybridflow.observe.report import Group, facts
from hybridflow.observe.report_charts import chart_groups
from hybridflow.observe.run_folder import RunFolder
from hybridflow.observe.templates import plain

_MOST_SETTINGS = 300
_MOST_DEPTH = 8
# they say where a run is, and differ between all runs
_PLACES = ("name", "output_dir")


def compared(one: RunFolder, two: RunFolder) -> dict[str, Any]:
    """Return the template values for the page `watch_compare`."""
    names = both_names(one, two)
    settings = list(different_settings(one.config, two.config))
    remarks = []
    for run, name in zip((one, two), names, strict=True):
        for line in run.missing:
            if "metrics.jsonl" in line:
                remarks.append(f"{name}: {line}")
    more = len(settings) - _MOST_SETTINGS
    if more > 0:
        remarks.append(f"{more} more settings differ")
    return {
        "names": names,
        "facts": list(_both_facts(one, two)),
        "settings": settings[:_MOST_SETTINGS],
        "remarks": remarks,
        "groups": overlaid(one, two, names),
    }


def different_settings(
    one: Mapping[str, Any], two: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, first value, second value) for each setting that differs; "–" if a run lacks
    it."""
    for key, first, second in _paired(dict(_flat(one)), dict(_flat(two))):
        if first != second and key not in _PLACES:
            yield key, first, second


def _paired(one: dict[str, str], two: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, first value, second value) for each key of either mapping; "–" if one lacks
    it."""
    for key in one | two:
        yield key, one.get(key, "–"), two.get(key, "–")


def overlaid(one: RunFolder, two: RunFolder, names: tuple[str, str]) -> list[Group]:
    """Return the report's line charts with a line for each run. A chart of several metrics becomes
    several charts."""
    others: dict[tuple[str, str], Series] = {}
    for _, charts in chart_groups(two):
        for chart in charts:
            for series in chart.series:
                others[chart.title, series.label] = series
    groups: list[Group] = []
    for title, charts in chart_groups(one):
        drawn: list[Drawn] = []
        for chart in charts:
            if chart.kind == "lines":
                drawn += _drawn_with(chart, others, names)
        if drawn:
            groups.append((title, drawn))
    return groups


def _drawn_with(
    chart: Chart, others: Mapping[tuple[str, str], Series], names: tuple[str, str]
) -> Iterator[Drawn]:
    """Draw each series of a chart together with the other run's series of the same name."""
    for series in chart.series:
        other = others.get((chart.title, series.label))
        if other is not None:
            found = draw(_of_both(chart, series, other, names))
            if found is not None:
                yield found


def _of_both(chart: Chart, first: Series, second: Series, names: tuple[str, str]) -> Chart:
    title = chart.title
    if len(chart.series) > 1:
        title += f": {first.label}"
    lines = (Series(names[0], first.points, 0), Series(names[1], second.points, 1))
    return replace(chart, title=title, series=lines, trend=False, notes=(), marks=())


def _both_facts(one: RunFolder, two: RunFolder) -> Iterator[tuple[str, str, str]]:
    first = {label: value for label, value, _ in facts(one)}
    second = {label: value for label, value, _ in facts(two)}
    return _paired(first, second)


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < _MOST_DEPTH:
            yield from _flat(value, f"{dotted}.", depth + 1)
        else:
            yield dotted, plain(value)


def both_names(one: RunFolder, two: RunFolder) -> tuple[str, str]:
    """Return the names of two runs, which differ."""
    if one.name == two.name:
        return f"{one.name} (first)", f"{two.name} (second)"
    return one.name, two.name
