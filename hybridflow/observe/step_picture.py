"""A picture of one step on all processes, drawn as inline SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from hybridflow.errors import DataError
from hybridflow.observe.charts import OTHER, Drawn
from hybridflow.observe.joined_timeline import DRIVER, WHOLE_STEP, JoinedTimeline, Span, join
from hybridflow.observe.plan_picture import (
    COLORS,
    axis,
    bar,
    colors_of,
    drawn,
    frame,
    legend_of,
)

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
    for process in timeline.processes[1:]:
        ends.append(max((span.end for span in process.main), default=0.0))
    if not ends:
        return []
    last = max(ends)
    whole = []
    for step, span in timeline.steps().items():
        if span.end <= last:
            whole.append((step, span))
    if not whole:
        return []
    whole.sort(key=lambda one: one[1].end - one[1].start)
    step, span = whole[len(whole) // 2]
    return [_draw(step, span, timeline.between(span.start, span.end))]


def _draw(step: int, whole: Span, timeline: JoinedTimeline) -> Drawn:
    rows = _rows(timeline, whole)
    names = _by_seconds(rows)
    colors = colors_of(names)
    x = axis([whole.end - whole.start])
    processes = [name for name, _ in rows]
    body: list[Markup] = [frame(processes, x)]
    for row, (_, spans) in enumerate(rows):
        for span in spans:
            start = max(span.start, whole.start) - whole.start
            end = min(span.end, whole.end) - whole.start
            body.append(bar(x, row, start, end, colors.get(span.name, OTHER)))
    legend = legend_of(colors)
    if len(names) > COLORS:
        legend.append((f"{len(names) - COLORS} others", OTHER, False))
    about = f"seconds since the start of step {step}"
    left = len(timeline.processes) - len(set(processes))
    if left > 0:
        about += f"; {left} more processes are not drawn"
    return drawn("A step on all processes", about, body, len(rows), legend)


def _by_seconds(rows: Sequence[tuple[str, Sequence[Span]]]) -> list[str]:
    """Return the names of all spans, in order of decreasing total duration."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for _, spans in rows:
        for span in spans:
            seconds[span.name] = seconds[span.name] + span.end - span.start
    return sorted(seconds, key=lambda name: -seconds[name])


def _rows(timeline: JoinedTimeline, whole: Span) -> list[tuple[str, list[Span]]]:
    """Return (process, spans) for each row. Nested phases of the driver are omitted. The row of
    requests in flight is derived from the driver's counters.
    """
    driver, *others = timeline.processes
    phases = []
    for span in driver.main:
        is_nested = "/" in span.name
        if span.name != WHOLE_STEP and not is_nested:
            phases.append(span)
    rows = [(DRIVER, phases)]
    rows += [(process.name, process.main) for process in others]
    for name, values in sorted(driver.counters.items()):
        if name.startswith(_COUNTED):
            engine = name.removeprefix(_COUNTED)
            rows.append((engine, _busy(values, whole)))
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
    if since is not None:
        found.append(Span(GENERATING, since, whole.end))
    return found
