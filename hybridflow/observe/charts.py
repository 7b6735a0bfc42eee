"""The report's charts, drawn as inline SVG: lines and stacked bars over steps. Colours are CSS
variables `--c0` … `--c7`, `--other`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
_RIGHT_EDGE = WIDTH - RIGHT
_FLOOR = HEIGHT - BOTTOM
MAX_POINTS = 1500  # points per line; longer series are drawn as means of neighbours
MAX_BARS = 80
OTHER = "var(--other)"  # the grey of "other"
_MARKERS_UP_TO = 40  # maximum points for drawing a dot at each
_TREND_FROM = 24  # minimum points for drawing a trend line

Point = tuple[float, float | None]
Legend = list[tuple[str, str, bool]]  # label, CSS colour, faint


@dataclass(frozen=True)
class Series:
    """The values of one quantity over steps; None leaves a gap. `color` is a palette index, or None
    for the grey of "other"."""

    label: str
    points: Sequence[Point]
    color: int | None = 0

    @property
    def css_color(self) -> str:
        """The colour of its line or bars, as a CSS value."""
        return OTHER if self.color is None else f"var(--c{self.color % 8})"


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
    """A chart ready for the page: the SVG, its legend entries, and a note if steps were
    averaged."""

    title: str
    about: str
    svg: Markup
    legend: Legend
    remark: str


def draw(chart: Chart) -> Drawn | None:
    """Draw a chart. Returns None if no series has a value to show."""
    usable = []
    for series in chart.series:
        drawable = _usable(series, chart.log)
        if any(y is not None for _, y in drawable.points):
            usable.append(drawable)
    if not usable:
        return None
    is_stack = chart.kind == "stack"
    if is_stack:
        usable = _aligned(usable)
    limit = MAX_BARS if is_stack else MAX_POINTS
    longest = max(len(series.points) for series in usable)
    size = math.ceil(longest / limit)
    thinned = [replace(series, points=thin(series.points, size)) for series in usable]
    body, legend = _stack(chart, thinned) if is_stack else _lines(chart, thinned)
    labels = ", ".join(series.label for series in usable)
    frame = Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}: {}" data-hover="{}">{}</svg>'
    )
    svg = frame.format(WIDTH, HEIGHT, chart.title, labels, _hover(chart, thinned), body)
    remark = ""
    if size > 1:
        each = "bar" if is_stack else "point"
        remark = f"Each {each} is the mean of {size} steps."
    return Drawn(chart.title, chart.about, svg, legend, remark)


def line_of(kind: str, x1: float, x2: float, y1: float, y2: float) -> Markup:
    """Return an SVG line with CSS class `kind`."""
    shape = '<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>'
    return Markup(shape).format(kind, x1, x2, y1, y2)


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
    shape = '<circle class="{}" cx="{}" cy="{}" r="{}" fill="{}"/>'
    return Markup(shape).format(kind, x, y, radius, color)


def thin(points: Sequence[Point], size: int) -> list[Point]:
    """Replace each group of `size` neighbours with its mean, ignoring None. A group that contains
    only None becomes None."""
    if size <= 1:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        middle = bucket[len(bucket) // 2]
        found.append((middle[0], _mean(bucket)))
    return found


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving average over about an eighth of the series. The window narrows at
    both ends, where the average would otherwise lag."""
    reach = max(2, len(points) // 16)
    last = len(points) - 1
    found: list[Point] = []
    for index, (x, _) in enumerate(points):
        side = max(reach // 3, min(reach, index, last - index))
        first = max(0, index - side)
        found.append((x, _mean(points[first : index + side + 1])))
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
        points = [(x, values.get(x) or 0.0) for x in steps]
        aligned.append(replace(one, points=points))
    return aligned


def _usable(series: Series, log: bool) -> Series:
    """Replace values that cannot be drawn with gaps: non-finite values and, on a logarithmic axis,
    values that are not positive."""
    points: list[Point] = []
    for x, y in series.points:
        can_draw = y is not None and math.isfinite(y) and (not log or y > 0)
        points.append((x, y if can_draw else None))
    return replace(series, points=points)


def _lines(chart: Chart, series: list[Series]) -> tuple[Markup, Legend]:
    y = _value_scale(chart, series)
    x = scale.steps(_steps_of(series), LEFT, _RIGHT_EDGE)
    parts = [_axes(chart, x, y)]
    for value, text in chart.lines:
        if y.low <= value <= y.high:
            parts.append(_reference(y(value), text))
    for at, text in chart.marks:
        if x.low <= at <= x.high:
            parts.append(_mark(x(at), text))
    legend = []
    first = series[0]
    trend = chart.trend and len(series) == 1 and len(first.points) >= _TREND_FROM
    kind = "raw" if trend else "line"
    for one in series:
        parts.append(_path(one.points, x, y, one.css_color, kind))
        legend.append((one.label, one.css_color, trend))
    if trend:
        average = moving_average(first.points)
        parts.append(_path(average, x, y, first.css_color, "trend"))
        legend.append(("moving average", first.css_color, False))
    for at, value, text in chart.notes:
        py = y(value)
        rises = y(chart.notes[-1][1]) < py
        parts.append(_note(x(at), py, text, rises))
    return Markup("").join(parts), legend if len(legend) > 1 else []


def _value_scale(chart: Chart, series: list[Series]) -> scale.Scale:
    values = [value for value, _ in chart.lines if not chart.log or value > 0]
    for one in series:
        values.extend(y for _, y in one.points if y is not None)
    if chart.log:
        return scale.logarithmic(values, _FLOOR, TOP)
    return scale.linear(values, _FLOOR, TOP, chart.include)


def _stack(chart: Chart, series: list[Series]) -> tuple[Markup, Legend]:
    """Draw one bar per x, with the first of the aligned series at the bottom."""
    columns: dict[float, list[float]] = {}
    for one in series:
        for at, value in one.points:
            columns.setdefault(at, []).append(max(0.0, value or 0.0))
    y = scale.linear(map(sum, columns.values()), _FLOOR, TOP, (0.0,))
    x = _bar_scale(list(columns))
    space = (_RIGHT_EDGE - LEFT) / len(columns)
    width = min(48.0, max(1.0, space * 0.82))
    parts = [_axes(chart, x, y)]
    for at, values in columns.items():
        left = round(x(at) - width / 2, 1)
        total = 0.0
        for one, value in zip(series, values, strict=True):
            bottom = y(total)
            total += value
            top = y(total)
            height = bottom - top
            if height >= 0.1:
                bar = bar_of(left, top, round(width, 1), round(height, 1), one.css_color)
                parts.append(bar)
    legend = [(one.label, one.css_color, False) for one in series]
    return Markup("").join(parts), legend


def _bar_scale(steps: list[float]) -> scale.Scale:
    """Return an x axis for bars at these ascending steps, with space for half a bar at both
    ends."""
    low = steps[0]
    high = steps[-1]
    gap = (high - low) / max(1, len(steps) - 1) or 1.0
    ticks = scale.steps(steps, LEFT, _RIGHT_EDGE).ticks
    inside = tuple(tick for tick in ticks if low <= tick <= high)
    return scale.Scale(low - gap / 2, high + gap / 2, LEFT, _RIGHT_EDGE, inside)


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
    has_dots = kind == "line" and count <= _MARKERS_UP_TO
    line = Markup('<polyline class="{}" points="{}" stroke="{}"/>')
    for segment in filter(None, segments):
        if len(segment) > 1:
            text = " ".join(f"{px:g},{py:g}" for px, py in segment)
            parts.append(line.format(kind, text, color))
        if len(segment) == 1 or has_dots:
            parts += [dot_of("dot", px, py, 2.2, color) for px, py in segment]
    return Markup("").join(parts)


def _axes(chart: Chart, x: scale.Scale, y: scale.Scale) -> Markup:
    parts = []
    for tick in y.ticks:
        at = y(tick)
        label = y.text(tick, chart.percent)
        parts.append(_across("grid", at))
        parts.append(text_of("tick", LEFT - 6, at + 4, label, "end"))
    parts.append(_across("axis", _FLOOR))
    for tick in x.ticks:
        parts.append(text_of("tick", x(tick), _FLOOR + 15, f"{tick:,.0f}", "middle"))
    middle = (LEFT + _RIGHT_EDGE) / 2
    parts.append(text_of("label", middle, HEIGHT - 6, "step", "middle"))
    if chart.unit:
        unit = f"{chart.unit}, log scale" if chart.log else chart.unit
        parts.append(text_of("label", LEFT - 6, 11, unit))
    return Markup("").join(parts)


def _across(kind: str, at: float) -> Markup:
    """Draw a horizontal line over the whole width of the plot."""
    return line_of(kind, LEFT, _RIGHT_EDGE, at, at)


def _reference(at: float, text: str) -> Markup:
    return _across("reference", at) + text_of("label", _RIGHT_EDGE, at - 4, text, "end")


def _mark(at: float, text: str) -> Markup:
    line = line_of("reference", at, at, TOP, _FLOOR)
    return line + text_of("label", at + 3, TOP + 8, text)


def _note(px: float, py: float, text: str, rises: bool) -> Markup:
    """Draw a labelled dot on the curve. At the left edge of a rising curve the label is below the
    dot, otherwise above."""
    at = py - 9 if py > TOP + 14 else py + 18
    start = px
    anchor = "middle"
    if px < LEFT + 60:
        start = px + 9
        anchor = "start"
        if rises:
            at = min(py + 16, _FLOOR - 5)
    elif px > _RIGHT_EDGE - 60:
        anchor = "end"
    return dot_of("note", px, py, 4.5, "var(--c0)") + text_of("value", start, at, text, anchor)


def _hover(chart: Chart, series: list[Series]) -> str:
    """Return the data for the page's hover script as JSON: the pixel position of each x, and the
    value of each series at that x."""
    steps = _steps_of(series)
    is_stack = chart.kind == "stack"
    x = _bar_scale(steps) if is_stack else scale.steps(steps, LEFT, _RIGHT_EDGE)
    rows = []
    for one in series:
        known = dict(one.points)
        values = [_short(known.get(at)) for at in steps]
        rows.append([one.label, one.css_color, values])
    data = {"x": steps, "px": list(map(x, steps)), "percent": chart.percent, "series": rows}
    return json.dumps(data, separators=(",", ":"))


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
