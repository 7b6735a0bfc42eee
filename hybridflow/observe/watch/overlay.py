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
    if len(settings) > _MOST_SETTINGS:
        remarks.append(f"{len(settings) - _MOST_SETTINGS} more settings differ")
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
    first = dict(_flat(one))
    second = dict(_flat(two))
    for key in dict.fromkeys([*first, *second]):
        values = (first.get(key, "–"), second.get(key, "–"))
        if values[0] != values[1] and key not in _PLACES:
            yield key, *values


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
            for series in chart.series:
                other = others.get((chart.title, series.label))
                if chart.kind == "lines" and other is not None:
                    found = draw(_of_both(chart, (series, other), names))
                    drawn += [found] if found is not None else []
        if drawn:
            groups.append((title, drawn))
    return groups


def _of_both(chart: Chart, pair: tuple[Series, Series], names: tuple[str, str]) -> Chart:
    lines = [
        Series(name, one.points, color)
        for one, name, color in zip(pair, names, (0, 1), strict=True)
    ]
    several = len(chart.series) > 1
    title = f"{chart.title}: {pair[0].label}" if several else chart.title
    return replace(chart, title=title, series=lines, trend=False, notes=(), marks=())


def _both_facts(one: RunFolder, two: RunFolder) -> Iterator[tuple[str, str, str]]:
    first = {label: value for label, value, _ in facts(one)}
    second = {label: value for label, value, _ in facts(two)}
    for label in dict.fromkeys([*first, *second]):
        yield label, first.get(label, "–"), second.get(label, "–")


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and depth < _MOST_DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", plain(value)


def both_names(one: RunFolder, two: RunFolder) -> tuple[str, str]:
    """Return the names of two runs, which differ."""
    names = [str(run.setting("name") or run.path.resolve().name) for run in (one, two)]
    if names[0] == names[1]:
        return f"{names[0]} (first)", f"{names[1]} (second)"
    return names[0], names[1]
