"""A picture of one step on all processes, drawn as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from hybridflow.errors import DataError
from hybridflow.observe.charts import Drawn
from hybridflow.observe.joined_timeline import DRIVER, WHOLE_STEP, JoinedTimeline, Span, join
from hybridflow.observe.plan_picture import axis, bar, drawn, frame

_COLORS = 8  # number of names with their own colour; the rest are grey
_MOST_ROWS = 16
_MOST_FILES = 24
_MOST_BYTES = 2 << 20  # read from each file, so that a report takes a second at most
_COUNTED = "requests of "
GENERATING = "requests in flight"


def step_pictures(run_dir: Path) -> list[Drawn]:
    """Return the picture of the step with the median duration; empty if the ranks recorded no
    spans.
    """
    try:
        timeline = join(run_dir, _MOST_FILES, _MOST_BYTES)
    except (DataError, OSError):
        return []
    ends = []
    for one in timeline.processes[1:]:
        ends.append(max((span.end for span in one.threads.get("main", [])), default=0.0))
    steps = timeline.steps()
    whole = sorted(
        (step for step, span in steps.items() if ends and span.end <= max(ends)),
        key=lambda step: steps[step].end - steps[step].start,
    )
    if not whole:
        return []
    step = whole[len(whole) // 2]
    return [_draw(step, steps[step], timeline.between(steps[step].start, steps[step].end))]


def _draw(step: int, whole: Span, timeline: JoinedTimeline) -> Drawn:
    rows = _rows(timeline, whole)
    names = _by_seconds(rows)
    colors = {name: f"var(--c{slot})" for slot, name in enumerate(names[:_COLORS])}
    x = axis([whole.end - whole.start])
    body: list[Markup] = [frame([name for name, _ in rows], x)]
    for row, (_, spans) in enumerate(rows):
        for span in spans:
            start = max(span.start, whole.start) - whole.start
            end = min(span.end, whole.end) - whole.start
            body.append(bar(x, row, start, end, colors.get(span.name, "var(--other)")))
    legend = [(name, colors[name], False) for name in names[:_COLORS]]
    if len(names) > _COLORS:
        legend.append((f"{len(names) - _COLORS} others", "var(--other)", False))
    left = len(timeline.processes) - len({name for name, _ in rows})
    about = f"seconds since the start of step {step}"
    about += f"; {left} more processes are not drawn" if left > 0 else ""
    return drawn("A step on all processes", about, body, len(rows), legend)


def _by_seconds(rows: Sequence[tuple[str, Sequence[Span]]]) -> list[str]:
    """Return the names of all spans, in order of decreasing total duration."""
    seconds: dict[str, float] = {}
    for _, spans in rows:
        for span in spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    return sorted(seconds, key=lambda name: -seconds[name])


def _rows(timeline: JoinedTimeline, whole: Span) -> list[tuple[str, list[Span]]]:
    """Return (process, spans) for each row. Nested phases of the driver are omitted. The row of
    requests in flight is derived from the driver's counters.
    """
    driver = timeline.processes[0]
    phases = [
        s for s in driver.threads.get("main", []) if s.name != WHOLE_STEP and "/" not in s.name
    ]
    rows = [(DRIVER, phases)]
    for one in timeline.processes[1:]:
        rows.append((one.name, one.threads.get("main", [])))
    for name, values in sorted(driver.counters.items()):
        if name.startswith(_COUNTED):
            rows.append((name.removeprefix(_COUNTED), _busy(values, whole)))
    return rows[:_MOST_ROWS]


def _busy(values: Sequence[tuple[float, float]], whole: Span) -> list[Span]:
    """Return the intervals in which a counter is above 0."""
    found = []
    since: float | None = None
    for at, value in values:
        if value > 0 and since is None:
            since = at
        elif value <= 0 and since is not None:
            found.append(Span(GENERATING, since, at))
            since = None
    return found if since is None else [*found, Span(GENERATING, since, whole.end)]
