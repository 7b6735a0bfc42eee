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
        for span in self.processes[0].threads.get("main", []):
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
    if not (run_dir / "timeline.jsonl").is_file():
        raise DataError(f"{run_dir} is not a run folder: timeline.jsonl not found")
    missing: list[str] = []
    driver = Process(DRIVER, {"main": _phases(run_dir / "timeline.jsonl", most_bytes, missing)})
    ahead: dict[str, tuple[float, float]] = {}
    others: list[Process] = []
    files = sorted((run_dir / "logs").glob(f"*{SUFFIX}")) if (run_dir / "logs").is_dir() else []
    most_bytes = min(most_bytes, _MOST_IN_ALL // max(len(files[:most_files]), 1))
    for file in files[:most_files]:
        skipped: list[int] = []
        try:
            records = list(read_jsonl(file, skipped, most_bytes))
        except DataError as error:
            missing.append(str(error))
            continue
        _note_skipped(file, skipped, missing)
        if file.name == DRIVER + SUFFIX:
            ahead = _clocks(records)
            _fill(driver, records)
        else:
            others.append(Process(file.name.removesuffix(SUFFIX)))
            _fill(others[-1], records)
    if len(files) > most_files:
        missing.append(f"only {most_files} of {len(files)} span files were read")
    if not others:
        missing.append(
            "the ranks recorded no spans: the run used one process, or an earlier version of "
            "HybridFlow"
        )
    return JoinedTimeline([driver, *(_shifted(one, ahead) for one in others)], missing)


def _phases(path: Path, most_bytes: int, missing: list[str]) -> list[Span]:
    """Return the driver's phases."""
    skipped: list[int] = []
    phases = []
    for record in read_timeline(path, skipped, most_bytes):
        start = record.get("start")
        end = record.get("end")
        step = record.get("step")
        if _is_time(start) and _is_time(end) and end >= start:
            phases.append(Span(record["name"], start, end, step if isinstance(step, int) else None))
    _note_skipped(path, skipped, missing)
    return sorted(phases, key=lambda span: (span.start, -span.end))


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over lanes such that any two spans in the same lane are disjoint or nested.
    Each span is put into the first lane that has room for it.
    """
    found: list[list[Span]] = []
    open_of: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
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
        at = record.get("at")
        start = record.get("start")
        seconds = record.get("seconds")
        if isinstance(record.get("name"), str) and _is_time(start) and _is_number(seconds):
            thread = str(record.get("thread", "main"))
            span = Span(record["name"], start, start + max(seconds, 0.0))
            process.threads.setdefault(thread, []).append(span)
        elif isinstance(record.get("counter"), str) and _is_time(at):
            if _is_number(value := record.get("value")):
                process.counters.setdefault(record["counter"], []).append((at, value))
        elif isinstance(record.get("mark"), str) and _is_time(at):
            process.marks.append((at, record["mark"]))
    for spans in process.threads.values():
        spans.sort(key=lambda span: (span.start, -span.end))


def _clocks(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return {process: (seconds ahead of the driver's clock, error)}, as measured most recently."""
    found = {}
    for record in records:
        ahead = record.get("ahead")
        within = record.get("within")
        if isinstance(record.get("clock"), str) and _is_number(ahead) and _is_number(within):
            found[record["clock"].replace(" rank ", "-rank")] = (float(ahead), float(within))
    return found


def _shifted(process: Process, ahead: Mapping[str, tuple[float, float]]) -> Process:
    """Convert a process's times to the driver's clock."""
    by, error = ahead.get(process.name, (0.0, 0.0))
    if not by:
        return process
    moved = Process(process.name, clock_error=error)
    for thread, spans in process.threads.items():
        moved.threads[thread] = [Span(s.name, s.start - by, s.end - by, s.step) for s in spans]
    for name, values in process.counters.items():
        moved.counters[name] = [(at - by, value) for at, value in values]
    moved.marks = [(at - by, text) for at, text in process.marks]
    return moved


def _note_skipped(path: Path, skipped: Sequence[int], missing: list[str]) -> None:
    if skipped:
        missing.append(f"{path.name}: damaged line(s) {number_ranges(skipped)} were skipped")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: object) -> TypeGuard[float]:
    """Return True for a plausible Unix time in seconds."""
    return _is_number(value) and _EPOCH_2000 < value < _EPOCH_2200
