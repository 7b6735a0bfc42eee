"""Pictures of a plan, drawn as inline SVG: the busiest device's memory in each phase, and the
schedule of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hybridflow.observe import scale
from hybridflow.observe.charts import Drawn, bar_of, line_of, text_of

WIDTH = 560
LEFT = 104
RIGHT = 62
TOP = 22
ROW = 26
BAR = 16
_CHARACTER = 7.5  # width of a character in a bar's value label
_GB = 1e9
_COLORS = 8  # number of parts with their own colour; the rest are grey

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
    return [_memory(holding, device_bytes), _schedule(timed, measured)] if holding else []


def _memory(phases: Sequence[Phase], device_bytes: float) -> Drawn:
    largest: dict[str, float] = {}
    for phase in phases:
        for part, size in phase["memory"].items():
            largest[part] = max(largest.get(part, 0.0), size)
    parts = sorted((part for part in largest if largest[part]), key=lambda part: -largest[part])
    colors = {part: f"var(--c{slot})" for slot, part in enumerate(parts[:_COLORS])}
    # on the scale of a device with far more memory than used, the bars would be too small
    peak = max(sum(phase["memory"].values()) for phase in phases)
    limit = device_bytes if device_bytes < 4 * peak else None
    unit, name = (_GB, "GB") if peak >= _GB else (1e6, "MB")
    x = axis([peak / unit, *([limit / unit] if limit else [])])
    body = [frame([phase["name"] for phase in phases], x)]
    for row, phase in enumerate(phases):
        floor = 0.0
        for part in [part for part in parts if part in phase["memory"]]:
            size = phase["memory"][part] / unit
            body.append(bar(x, row, floor, floor + size, colors.get(part, "var(--other)")))
            floor += size
        body.append(_value(x(floor), row, f"{floor:,.1f}"))
    if limit:
        at = x(limit / unit)
        body.append(line_of("reference", at, at, TOP - 4, TOP + ROW * len(phases)))
        body.append(
            text_of("label", at, TOP - 9, f"{limit / unit:,.0f} {name} per device", "middle")
        )
    legend = [(part, colors[part], False) for part in parts[:_COLORS]]
    if len(parts) > _COLORS:
        legend.append((", ".join(parts[_COLORS:]), "var(--other)", False))
    return drawn(
        "Planned memory", f"{name} on the busiest device, by phase", body, len(phases), legend
    )


def _schedule(phases: Sequence[Phase], measured: Mapping[str, float]) -> Drawn:
    planned = _spans(phases, "begin", {phase["name"]: phase["seconds"] for phase in phases})
    taken = _spans(phases, "measured_begin", measured)
    texts = []
    for phase in phases:
        text = _seconds(phase["seconds"])
        if phase["name"] in measured:
            text += f" | {_seconds(measured[phase['name']])}"
        texts.append(text)
    ends = [end for _, end in (*planned.values(), *taken.values())]
    x = axis(ends, max(map(len, texts), default=0))
    body = [frame([phase["name"] for phase in phases], x)]
    parts = 2 if measured else 1
    for row, phase in enumerate(phases):
        last = 0.0
        for part, found in enumerate((planned, taken)):
            if phase["name"] in found:
                begin, end = found[phase["name"]]
                body.append(bar(x, row, begin, end, f"var(--c{part})", part, parts))
                last = max(last, end)
        body.append(_value(x(last), row, texts[row]))
    legend = [("planned", "var(--c0)", False), ("measured", "var(--c1)", False)] if measured else []
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
        if phase["name"] in seconds:
            start = phase.get(begin)
            start = end if start is None else start
            end = start + seconds[phase["name"]]
            found[phase["name"]] = (start, end)
    return found


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 0.95 else f"{value:.2g} s"


def axis(values: Sequence[float], characters: int = 0) -> scale.Scale:
    """Return an axis from 0 to the largest value, leaving space for this many characters after the
    longest bar."""
    right = max(RIGHT, 5 + _CHARACTER * characters)
    return scale.linear([max([*values, 1e-9])], LEFT, WIDTH - right, (0.0,))


def frame(names: Sequence[str], x: scale.Scale) -> Markup:
    """Draw the grid, the ticks and the row names."""
    bottom = TOP + ROW * len(names)
    parts = [line_of("grid", x(tick), x(tick), TOP, bottom) for tick in x.ticks]
    parts += [text_of("tick", x(tick), bottom + 15, x.text(tick), "middle") for tick in x.ticks]
    parts += [
        text_of("label", LEFT - 8, _middle(row), name, "end") for row, name in enumerate(names)
    ]
    return Markup("").join(parts)


def _middle(row: int) -> float:
    """Return the y coordinate of the baseline of text that is centred vertically in a row."""
    return TOP + ROW * row + ROW / 2 + 4


def bar(
    x: scale.Scale, row: int, start: float, end: float, color: str, part: int = 0, parts: int = 1
) -> Markup:
    """Draw a bar in a row, or one of several stacked bars, at least one pixel wide so that every
    phase is visible."""
    height = BAR / parts
    width = max(round(x(end) - x(start), 1), 1)
    return bar_of(x(start), TOP + ROW * row + (ROW - BAR) / 2 + part * height, width, height, color)


def _value(at: float, row: int, text: str) -> Markup:
    """Draw the value label of a bar."""
    return text_of("value", at + 5, _middle(row), text)


def drawn(
    title: str, about: str, body: list[Markup], rows: int, legend: list[tuple[str, str, bool]]
) -> Drawn:
    """Return a picture that is tall enough for `rows` rows."""
    svg = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, TOP + ROW * rows + 22, title, Markup("").join(body)
    )
    return Drawn(title, about, svg, legend, "")
