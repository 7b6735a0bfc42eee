"""The report's charts, drawn as inline SVG: lines and stacked bars over steps. Colours are CSS
variables `--c0` … `--c7`, `--other`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from markupsafe import Markup

from hybridflow.observe import scale

WIDTH = 440
HEIGHT = 240
LEFT = 54
RIGHT = 14
TOP = 20
BOTTOM = 38
MAX_POINTS = 1500  # points per line; longer series are drawn as means of neighbours
MAX_BARS = 80
_MARKERS_UP_TO = 40  # maximum points for drawing a dot at each
_TREND_FROM = 24  # minimum points for drawing a trend line

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """The values of one quantity over steps; None leaves a gap. `color` is a palette index, or None
    for the grey of "other"."""

    label: str
    points: Sequence[Point]
    color: int | None = 0


@dataclass(frozen=True)
class Chart:
    """The specification of a chart.

    `trend` draws a single series faintly, overlaid with its moving average. `include` lists values
    that the y axis must cover. `lines` are horizontal reference lines (value, text), `marks`
    vertical ones (step, text), and `notes` labelled points (x, y, text).
    """

    title: str
    series: Sequence[Series]
    unit: str = ""
    about: str = ""
    kind: Literal["lines", "stack"] = "lines"
    phase: str = "train"  # the phase of its steps
    log: bool = False
    percent: bool = False
    trend: bool = False
    include: Sequence[float] = ()
    lines: Sequence[tuple[float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    notes: Sequence[tuple[float, float, str]] = field(default=())


@dataclass(frozen=True)
class Drawn:
    """A chart ready for the page: the SVG, its legend entries (label, CSS colour, faint), and a
    note if steps were averaged."""

    title: str
    about: str
    svg: Markup
    legend: list[tuple[str, str, bool]]
    remark: str


def draw(chart: Chart) -> Drawn | None:
    """Draw a chart. Returns None if no series has a value to show."""
    usable = [_usable(series, chart.log) for series in chart.series]
    usable = [series for series in usable if any(y is not None for _, y in series.points)]
    if not usable:
        return None
    if chart.kind == "stack":
        usable = _aligned(usable)
    limit = MAX_BARS if chart.kind == "stack" else MAX_POINTS
    size = max(math.ceil(len(series.points) / limit) for series in usable)
    thinned = []
    for series in usable:
        thinned.append(Series(series.label, thin(series.points, size), series.color))
    body, legend = _stack(chart, thinned) if chart.kind == "stack" else _lines(chart, thinned)
    each = "bar" if chart.kind == "stack" else "point"
    label = f"{chart.title}: {', '.join(series.label for series in usable)}"
    svg = Markup(
        '<svg viewBox="0 0 {w} {h}" role="img" aria-label="{label}" '
        'data-hover="{hover}">{body}</svg>'
    ).format(w=WIDTH, h=HEIGHT, label=label, hover=_hover(chart, thinned), body=body)
    return Drawn(
        chart.title,
        chart.about,
        svg,
        legend,
        f"Each {each} is the mean of {size} steps." if size > 1 else "",
    )


def line_of(kind: str, x1: float, x2: float, y1: float, y2: float) -> Markup:
    """Return an SVG line with CSS class `kind`."""
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(kind, x1, x2, y1, y2)


def text_of(kind: str, x: float, y: float, text: str, anchor: str = "") -> Markup:
    """Return an SVG text with CSS class `kind`. `anchor` (start, middle or end) is the part of the
    text that is placed at `x`.
    """
    at = Markup(' text-anchor="{}"').format(anchor) if anchor else ""
    return Markup('<text class="{}" x="{}" y="{}"{}>{}</text>').format(kind, x, y, at, text)


def bar_of(x: float, y: float, width: float, height: float, color: str) -> Markup:
    """Return a filled SVG rectangle whose upper left corner is at (x, y)."""
    shape = '<rect class="bar" x="{}" y="{}" width="{}" height="{}" fill="{}"/>'
    return Markup(shape).format(x, y, width, height, color)


def dot_of(kind: str, x: float, y: float, radius: float, color: str) -> Markup:
    """Return a filled SVG circle with CSS class `kind`."""
    return Markup('<circle class="{}" cx="{}" cy="{}" r="{}" fill="{}"/>').format(
        kind, x, y, radius, color
    )


def thin(points: Sequence[Point], size: int) -> list[Point]:
    """Replace each group of `size` neighbours with its mean, ignoring None. A group that contains
    only None becomes None."""
    if size <= 1:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        found.append((bucket[len(bucket) // 2][0], _mean(bucket)))
    return found


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving average over about an eighth of the series. The window narrows at
    both ends, where the average would otherwise lag."""
    reach = max(2, len(points) // 16)
    found: list[Point] = []
    for index, (x, _) in enumerate(points):
        side = max(reach // 3, min(reach, index, len(points) - 1 - index))
        found.append((x, _mean(points[max(0, index - side) : index + side + 1])))
    return found


def _mean(points: Sequence[Point]) -> float | None:
    known = [y for _, y in points if y is not None]
    return sum(known) / len(known) if known else None


def _steps_of(series: Sequence[Series]) -> list[float]:
    points = chain.from_iterable(one.points for one in series)
    return sorted({at for at, _ in points})


def _aligned(series: list[Series]) -> list[Series]:
    """Extend all series to the same steps, using zero for missing phases. Without this, the bars of
    sparse phases would be misaligned."""
    steps = _steps_of(series)
    aligned: list[Series] = []
    for one in series:
        values = dict(one.points)
        aligned.append(Series(one.label, [(x, values.get(x) or 0.0) for x in steps], one.color))
    return aligned


def _usable(series: Series, log: bool) -> Series:
    """Replace values that cannot be drawn with gaps: non-finite values and, on a logarithmic axis,
    values that are not positive."""
    points = []
    for x, y in series.points:
        points.append((x, y if y is not None and math.isfinite(y) and (not log or y > 0) else None))
    return Series(series.label, points, series.color)


def _lines(chart: Chart, series: list[Series]) -> tuple[Markup, list[tuple[str, str, bool]]]:
    y = _value_scale(chart, series)
    x = scale.steps(_steps_of(series), LEFT, WIDTH - RIGHT)
    parts = [_axes(chart, x, y)]
    for value, text in chart.lines:
        if y.low <= value <= y.high:
            parts.append(_reference(y(value), text))
    for at, text in chart.marks:
        if x.low <= at <= x.high:
            parts.append(_mark(x(at), text))
    legend = []
    trend = chart.trend and len(series) == 1 and len(series[0].points) >= _TREND_FROM
    for one in series:
        parts.append(_path(one.points, x, y, _color(one.color), "raw" if trend else "line"))
        legend.append((one.label, _color(one.color), trend))
    if trend:
        parts.append(
            _path(moving_average(series[0].points), x, y, _color(series[0].color), "trend")
        )
        legend.append(("moving average", _color(series[0].color), False))
    for at, value, text in chart.notes:
        parts.append(_note(x(at), y(value), text, y(chart.notes[-1][1]) < y(value)))
    return Markup("").join(parts), legend if len(legend) > 1 else []


def _value_scale(chart: Chart, series: list[Series]) -> scale.Scale:
    values = [value for value, _ in chart.lines if not chart.log or value > 0]
    for one in series:
        values.extend(y for _, y in one.points if y is not None)
    if chart.log:
        return scale.logarithmic(values, HEIGHT - BOTTOM, TOP)
    return scale.linear(values, HEIGHT - BOTTOM, TOP, chart.include)


def _stack(chart: Chart, series: list[Series]) -> tuple[Markup, list[tuple[str, str, bool]]]:
    """Draw one bar per x, with the first series at the bottom."""
    columns: dict[float, list[float]] = {}
    for index, one in enumerate(series):
        for at, value in one.points:
            columns.setdefault(at, [0.0] * len(series))[index] = max(0.0, value or 0.0)
    y = scale.linear(list(map(sum, columns.values())), HEIGHT - BOTTOM, TOP, (0.0,))
    low = min(columns)
    high = max(columns)
    gap = (high - low) / max(1, len(columns) - 1) or 1.0
    ticks = tuple(
        tick for tick in scale.steps(columns, LEFT, WIDTH - RIGHT).ticks if low <= tick <= high
    )
    x = scale.Scale(low - gap / 2, high + gap / 2, LEFT, WIDTH - RIGHT, ticks)
    width = min(48.0, max(1.0, (WIDTH - LEFT - RIGHT) / len(columns) * 0.82))
    parts = [_axes(chart, x, y)]
    for at in sorted(columns):
        floor = 0.0
        for one, value in zip(series, columns[at], strict=True):
            top = y(floor + value)
            height = y(floor) - top
            floor += value
            if height >= 0.1:
                left = round(x(at) - width / 2, 1)
                parts.append(
                    bar_of(left, top, round(width, 1), round(height, 1), _color(one.color))
                )
    return Markup("").join(parts), [(one.label, _color(one.color), False) for one in series]


def _path(points: Iterable[Point], x: scale.Scale, y: scale.Scale, color: str, kind: str) -> Markup:
    """Draw polylines between gaps, and a dot for a single point between two gaps."""
    segments: list[list[tuple[float, float]]] = [[]]
    count = 0
    for at, value in points:
        if value is None:
            segments.append([])
        else:
            segments[-1].append((x(at), y(value)))
            count += 1
    parts = []
    for segment in filter(None, segments):
        if len(segment) > 1:
            text = " ".join(f"{px:g},{py:g}" for px, py in segment)
            parts.append(
                Markup('<polyline class="{}" points="{}" stroke="{}"/>').format(kind, text, color)
            )
        if len(segment) == 1 or (kind == "line" and count <= _MARKERS_UP_TO):
            parts += [dot_of("dot", px, py, 2.2, color) for px, py in segment]
    return Markup("").join(parts)


def _axes(chart: Chart, x: scale.Scale, y: scale.Scale) -> Markup:
    parts = []
    for tick in y.ticks:
        at = y(tick)
        parts.append(line_of("grid", LEFT, WIDTH - RIGHT, at, at))
        parts.append(text_of("tick", LEFT - 6, at + 4, y.text(tick, chart.percent), "end"))
    floor = HEIGHT - BOTTOM
    parts.append(line_of("axis", LEFT, WIDTH - RIGHT, floor, floor))
    parts += [text_of("tick", x(tick), floor + 15, f"{tick:,.0f}", "middle") for tick in x.ticks]
    parts.append(text_of("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    if chart.unit:
        parts.append(
            text_of("label", LEFT - 6, 11, chart.unit + (", log scale" if chart.log else ""))
        )
    return Markup("").join(parts)


def _reference(at: float, text: str) -> Markup:
    right = WIDTH - RIGHT
    return line_of("reference", LEFT, right, at, at) + text_of("label", right, at - 4, text, "end")


def _mark(at: float, text: str) -> Markup:
    return line_of("reference", at, at, TOP, HEIGHT - BOTTOM) + text_of(
        "label", at + 3, TOP + 8, text
    )


def _note(px: float, py: float, text: str, rises: bool) -> Markup:
    """Draw a labelled dot on the curve. At the left edge of a rising curve the label is below the
    dot, otherwise above."""
    left = px < LEFT + 60
    right = px > WIDTH - RIGHT - 60
    anchor = {(True, False): "start", (False, True): "end"}.get((left, right), "middle")
    at = py - 9 if py > TOP + 14 else py + 18
    if left and rises:
        at = min(py + 16, HEIGHT - BOTTOM - 5)
    return dot_of("note", px, py, 4.5, _color(0)) + text_of(
        "value", px + (9 if left else 0), at, text, anchor
    )


def _color(slot: int | None) -> str:
    return "var(--other)" if slot is None else f"var(--c{slot % 8})"


def _hover(chart: Chart, series: list[Series]) -> str:
    """Return the data for the page's hover script as JSON: the pixel position of each x, and the
    value of each series at that x."""
    xs = _steps_of(series)
    gap = (xs[-1] - xs[0]) / max(1, len(xs) - 1) or 1.0
    x = scale.steps(xs, LEFT, WIDTH - RIGHT)
    if chart.kind == "stack":
        x = scale.Scale(xs[0] - gap / 2, xs[-1] + gap / 2, LEFT, WIDTH - RIGHT, ())
    rows = []
    for one in series:
        known = dict(one.points)
        rows.append([one.label, _color(one.color), [_short(known.get(at)) for at in xs]])
    data = {"x": xs, "px": list(map(x, xs)), "percent": chart.percent, "series": rows}
    return json.dumps(data, separators=(",", ":"))


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
