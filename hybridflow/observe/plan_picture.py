"""Pictures of a plan, drawn as inline SVG: the busiest device's memory in each phase, and the
schedule of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hybridflow.observe import scale
from hybridflow.observe.charts import OTHER, Drawn, Legend, bar_of, line_of, text_of

WIDTH = 560
LEFT = 104
RIGHT = 62
TOP = 22
ROW = 26
BAR = 16
_CHARACTER = 7.5  # width of a character in a bar's value label
_GB = 1e9
COLORS = 8  # number of parts with their own colour; the rest are grey

Phase = Mapping[str, Any]


def pictures(
    phases: Sequence[Phase], device_bytes: float, measured: Mapping[str, float]
) -> list[Drawn]:
    """Draw memory bars and the schedule of a step.

    Args:
        phases: phases from `Plan.figures()`: name, begin, seconds, and the bytes of each part on
            the busiest device; measured runs add measured_begin. Phases without `begin` are
            consecutive.
        device_bytes: memory capacity of a device.
        measured: measured seconds for each phase.
    """
    holding = [phase for phase in phases if phase["memory"]]
    # the time of an infeasible phase (no space for a KV cache) is infinite
    timed = [phase for phase in phases if math.isfinite(phase["seconds"])]
    if not holding:
        return []
    return [_memory(holding, device_bytes), _schedule(timed, measured)]


def _memory(phases: Sequence[Phase], device_bytes: float) -> Drawn:
    parts = _by_size(phases)
    colors = colors_of(parts)
    # on the scale of a device with far more memory than used, the bars would be too small
    peak = max(sum(phase["memory"].values()) for phase in phases)
    unit, name = (_GB, "GB") if peak >= _GB else (1e6, "MB")
    ends = [peak / unit]
    shows_limit = 0 < device_bytes < 4 * peak
    limit = device_bytes / unit
    if shows_limit:
        ends.append(limit)
    x = axis(ends)
    body = [frame(_names(phases), x)]
    for row, phase in enumerate(phases):
        memory = phase["memory"]
        floor = 0.0
        for part in parts:
            if part in memory:
                top = floor + memory[part] / unit
                body.append(bar(x, row, floor, top, colors.get(part, OTHER)))
                floor = top
        body.append(_value(x(floor), row, f"{floor:,.1f}"))
    if shows_limit:
        at = x(limit)
        bottom = TOP + ROW * len(phases)
        text = f"{limit:,.0f} {name} per device"
        body.append(line_of("reference", at, at, TOP - 4, bottom))
        body.append(text_of("label", at, TOP - 9, text, "middle"))
    legend = legend_of(colors)
    if len(parts) > COLORS:
        rest = ", ".join(parts[COLORS:])
        legend.append((rest, OTHER, False))
    about = f"{name} on the busiest device, by phase"
    return drawn("Planned memory", about, body, len(phases), legend)


def _names(phases: Sequence[Phase]) -> list[str]:
    return [phase["name"] for phase in phases]


def _by_size(phases: Sequence[Phase]) -> list[str]:
    """Return the parts that take memory in any phase, the largest first."""
    largest: dict[str, float] = {}
    for phase in phases:
        for part, size in phase["memory"].items():
            largest[part] = max(largest.get(part, 0.0), size)
    used = [part for part, size in largest.items() if size]
    return sorted(used, key=lambda part: -largest[part])


def _schedule(phases: Sequence[Phase], measured: Mapping[str, float]) -> Drawn:
    planned = _spans(phases, "begin", {phase["name"]: phase["seconds"] for phase in phases})
    taken = _spans(phases, "measured_begin", measured)
    texts = []
    for phase in phases:
        name = phase["name"]
        text = _seconds(phase["seconds"])
        if name in measured:
            text += f" | {_seconds(measured[name])}"
        texts.append(text)
    ends = [end for _, end in (*planned.values(), *taken.values())]
    longest_text = max(map(len, texts), default=0)
    x = axis(ends, longest_text)
    names = _names(phases)
    body = [frame(names, x)]
    parts = 2 if measured else 1
    for row, name in enumerate(names):
        last = 0.0
        for part, found in enumerate((planned, taken)):
            if name in found:
                begin, end = found[name]
                body.append(bar(x, row, begin, end, f"var(--c{part})", part, parts))
                last = max(last, end)
        body.append(_value(x(last), row, texts[row]))
    legend = legend_of({"planned": "var(--c0)", "measured": "var(--c1)"}) if measured else []
    about = (
        "seconds from the start of generation; phases longer than a step overlap with the next step"
    )
    return drawn("Schedule of a step", about, body, len(phases), legend)


def _spans(
    phases: Sequence[Phase], begin: str, seconds: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return (begin, end) for each phase in `seconds`, keyed by name."""
    found: dict[str, tuple[float, float]] = {}
    end = 0.0
    for phase in phases:
        name = phase["name"]
        if name in seconds:
            start = phase.get(begin)
            if start is None:
                start = end
            end = start + seconds[name]
            found[name] = (start, end)
    return found


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 0.95 else f"{value:.2g} s"


def axis(values: Sequence[float], characters: int = 0) -> scale.Scale:
    """Return an axis from 0 to the largest value, leaving space for this many characters after the
    longest bar."""
    right = max(RIGHT, 5 + _CHARACTER * characters)
    largest = max([*values, 1e-9])
    return scale.linear([largest], LEFT, WIDTH - right, (0.0,))


def frame(names: Sequence[str], x: scale.Scale) -> Markup:
    """Draw the grid, the ticks and the row names."""
    bottom = TOP + ROW * len(names)
    lines = []
    ticks = []
    for tick in x.ticks:
        at = x(tick)
        lines.append(line_of("grid", at, at, TOP, bottom))
        ticks.append(text_of("tick", at, bottom + 15, x.text(tick), "middle"))
    labels = []
    for row, name in enumerate(names):
        labels.append(text_of("label", LEFT - 8, _middle(row), name, "end"))
    return Markup("").join([*lines, *ticks, *labels])


def _middle(row: int) -> float:
    """Return the y coordinate of the baseline of text that is centred vertically in a row."""
    return TOP + ROW * row + ROW / 2 + 4


def bar(
    x: scale.Scale, row: int, start: float, end: float, color: str, part: int = 0, parts: int = 1
) -> Markup:
    """Draw a bar in a row, or one of several stacked bars, at least one pixel wide so that every
    phase is visible."""
    height = BAR / parts
    left = x(start)
    top = TOP + ROW * row + (ROW - BAR) / 2 + part * height
    width = max(round(x(end) - left, 1), 1)
    return bar_of(left, top, width, height, color)


def _value(at: float, row: int, text: str) -> Markup:
    """Draw the value label of a bar."""
    return text_of("value", at + 5, _middle(row), text)


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour of the palette for each of the first names; the rest are drawn grey."""
    return {name: f"var(--c{slot})" for slot, name in enumerate(names[:COLORS])}


def legend_of(colors: Mapping[str, str]) -> Legend:
    """Return the legend of a picture with these colours."""
    return [(name, color, False) for name, color in colors.items()]


def drawn(title: str, about: str, body: list[Markup], rows: int, legend: Legend) -> Drawn:
    """Return a picture that is tall enough for `rows` rows."""
    height = TOP + ROW * rows + 22
    shape = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    svg = Markup(shape).format(WIDTH, height, title, Markup("").join(body))
    return Drawn(title, about, svg, legend, "")
