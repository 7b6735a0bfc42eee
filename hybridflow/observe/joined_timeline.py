"""The timeline of all processes of a run, on the driver's clock. The driver's phases are read from
`timeline.jsonl`, and the calls of ranks and engine workers are read from `logs/*.spans.jsonl`
(`hybridflow.observe.spans`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hybridflow.errors import DataError
from hybridflow.observe.jsonl import number_ranges, read_jsonl
from hybridflow.observe.spans import SUFFIX
from hybridflow.observe.timeline import WHOLE_STEP, read_timeline

DRIVER = "driver"
_MOST_BYTES = 64 << 20  # read from each file
_MOST_FILES = 4096
_MOST_IN_ALL = 512 << 20
_EPOCH_2000 = 946684800.0
_EPOCH_2200 = 7258118400.0


@dataclass(frozen=True)
class Span:
    """A named interval, in Unix seconds on the driver's clock. `step` is set only for the driver's
    phases.
    """

    name: str
    start: float
    end: float
    step: int | None = None


@dataclass
class Process:
    """The spans, counters and events of one process.

    Attributes:
        threads: {thread: its spans, ordered by start}.
        counters: {name: (time, value) pairs, ordered by time}.
        marks: (time, text) of events without duration.
        clock_error: maximum error of its times relative to the driver's clock, in seconds.
    """

    name: str
    threads: dict[str, list[Span]] = field(default_factory=dict)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)
    clock_error: float = 0.0

    @property
    def main(self) -> list[Span]:
        """The spans of its main thread."""
        return self.threads.get("main", [])


@dataclass
class JoinedTimeline:
    """The processes of a run, starting with the driver. `missing` contains a sentence about each
    missing part.
    """

    processes: list[Process]
    missing: list[str] = field(default_factory=list)

    def steps(self) -> dict[int, Span]:
        """Return {step: the span that covers the whole step}."""
        found = {}
        for span in self.processes[0].main:
            if span.name == WHOLE_STEP and span.step is not None:
                found[span.step] = span
        return found

    def between(self, start: float, end: float) -> JoinedTimeline:
        """Return the part of the timeline that overlaps this interval."""
        chosen = []
        for one in self.processes:
            part = Process(one.name, clock_error=one.clock_error)
            for thread, spans in one.threads.items():
                part.threads[thread] = [s for s in spans if s.end >= start and s.start <= end]
            for name, values in one.counters.items():
                part.counters[name] = [(at, v) for at, v in values if start <= at <= end]
            part.marks = [(at, text) for at, text in one.marks if start <= at <= end]
            chosen.append(part)
        return JoinedTimeline(chosen, self.missing)


def join(
    run_dir: Path, most_files: int = _MOST_FILES, most_bytes: int = _MOST_BYTES
) -> JoinedTimeline:
    """Read the timeline of a run folder. Reads at most `most_files` span files, and at most
    `most_bytes` of each.

    Raises:
        DataError: the folder has no timeline.
    """
    path = run_dir / "timeline.jsonl"
    if not path.is_file():
        raise DataError(f"{run_dir} is not a run folder: timeline.jsonl not found")
    missing: list[str] = []
    driver = Process(DRIVER, {"main": _phases(path, most_bytes, missing)})
    ahead: dict[str, tuple[float, float]] = {}
    others: list[Process] = []
    logs = run_dir / "logs"
    files = sorted(logs.glob(f"*{SUFFIX}")) if logs.is_dir() else []
    chosen = files[:most_files]
    share = _MOST_IN_ALL // max(len(chosen), 1)
    most_bytes = min(most_bytes, share)
    for file in chosen:
        skipped: list[int] = []
        try:
            records = list(read_jsonl(file, skipped, most_bytes))
        except DataError as error:
            missing.append(str(error))
            continue
        _note_skipped(file, skipped, missing)
        name = file.name.removesuffix(SUFFIX)
        if name == DRIVER:
            ahead = _clocks(records)
            _fill(driver, records)
        else:
            process = Process(name)
            _fill(process, records)
            others.append(process)
    if len(files) > most_files:
        missing.append(f"only {most_files} of {len(files)} span files were read")
    if not others:
        missing.append(
            "the ranks recorded no spans: the run used one process, or an earlier version of "
            "HybridFlow"
        )
    shifted = [_shifted(process, ahead) for process in others]
    return JoinedTimeline([driver, *shifted], missing)


def _phases(path: Path, most_bytes: int, missing: list[str]) -> list[Span]:
    """Return the driver's phases."""
    skipped: list[int] = []
    phases = []
    for record in read_timeline(path, skipped, most_bytes):
        start = record.get("start")
        end = record.get("end")
        step = record.get("step")
        if not isinstance(step, int):
            step = None
        if _is_time(start) and _is_time(end) and end >= start:
            phases.append(Span(record["name"], start, end, step))
    _note_skipped(path, skipped, missing)
    return sorted(phases, key=_outer_first)


def _outer_first(span: Span) -> tuple[float, float]:
    """Return a key that sorts spans by start, and a span before those nested in it."""
    return span.start, -span.end


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over lanes such that any two spans in the same lane are disjoint or nested.
    Each span is put into the first lane that has room for it.
    """
    found: list[list[Span]] = []
    open_of: list[list[Span]] = []
    for span in sorted(spans, key=_outer_first):
        for lane, is_open in zip(found, open_of, strict=True):
            while is_open and is_open[-1].end <= span.start:
                is_open.pop()
            if not is_open or span.end <= is_open[-1].end:
                lane.append(span)
                is_open.append(span)
                break
        else:
            found.append([span])
            open_of.append([span])
    return found


def busy_seconds(spans: Iterable[Span], start: float, end: float) -> float:
    """Return how many seconds of an interval are covered by spans."""
    covered = 0.0
    reached = start
    for span in sorted(spans, key=lambda one: one.start):
        first = max(span.start, reached)
        last = min(span.end, end)
        if last > first:
            covered += last - first
            reached = last
    return covered


def _fill(process: Process, records: Sequence[Mapping[str, Any]]) -> None:
    """Add the records of a span file to a process."""
    for record in records:
        name = record.get("name")
        counter = record.get("counter")
        mark = record.get("mark")
        at = record.get("at")
        start = record.get("start")
        seconds = record.get("seconds")
        if isinstance(name, str) and _is_time(start) and _is_number(seconds):
            thread = str(record.get("thread", "main"))
            span = Span(name, start, start + max(seconds, 0.0))
            process.threads.setdefault(thread, []).append(span)
        elif isinstance(counter, str) and _is_time(at):
            value = record.get("value")
            if _is_number(value):
                process.counters.setdefault(counter, []).append((at, value))
        elif isinstance(mark, str) and _is_time(at):
            process.marks.append((at, mark))
    for spans in process.threads.values():
        spans.sort(key=_outer_first)


def _clocks(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return {process: (seconds ahead of the driver's clock, error)}, as measured most recently."""
    found = {}
    for record in records:
        clock = record.get("clock")
        ahead = record.get("ahead")
        within = record.get("within")
        if isinstance(clock, str) and _is_number(ahead) and _is_number(within):
            process = clock.replace(" rank ", "-rank")
            found[process] = (float(ahead), float(within))
    return found


def _shifted(process: Process, ahead: Mapping[str, tuple[float, float]]) -> Process:
    """Convert a process's times to the driver's clock."""
    by, error = ahead.get(process.name, (0.0, 0.0))
    if not by:
        return process
    moved = Process(process.name, clock_error=error)
    for thread, spans in process.threads.items():
        earlier = []
        for span in spans:
            earlier.append(Span(span.name, span.start - by, span.end - by, span.step))
        moved.threads[thread] = earlier
    for name, values in process.counters.items():
        moved.counters[name] = [(at - by, value) for at, value in values]
    moved.marks = [(at - by, text) for at, text in process.marks]
    return moved


def _note_skipped(path: Path, skipped: Sequence[int], missing: list[str]) -> None:
    if skipped:
        lines = number_ranges(skipped)
        missing.append(f"{path.name}: damaged line(s) {lines} were skipped")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: object) -> TypeGuard[float]:
    """Return True for a plausible Unix time in seconds."""
    return _is_number(value) and _EPOCH_2000 < value < _EPOCH_2200
