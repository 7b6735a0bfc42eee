"""Timing of the controller's phases. They are recorded in `timeline.jsonl`, from which the
`timing_s/*` metrics are derived.

One line per finished phase: `{"name": "gen", "step": 3, "start": ..., "end": ..., "seconds": ...,
"depth": 1}`. Start and end are Unix timestamps; `seconds` comes from a monotonic clock. A nested
phase is named `outer/inner`, except inside `step`, which spans the whole step. If a phase raised an
exception, its record contains the exception's name under `"error"`. The phases of roles on separate
devices overlap. The update of a critic on separate devices may extend into the next step; its
record contains the number of the step that it belongs to.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hybridflow.observe.jsonl import JsonlWriter, read_jsonl

WHOLE_STEP = "step"
# number of steps whose sums are kept in memory; metrics are read right after a step
_STEPS_HELD = 256


class Span:
    """A running phase.

    Args:
        record: called with the phase's record when it ends.
    """

    def __init__(
        self, name: str, step: int | None, depth: int, record: Callable[[dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.step = step
        self._depth = depth
        self._record_of = record
        self._start = time.time()
        self._ticks = time.perf_counter()

    def end(self, error: str = "") -> None:
        """Record the end of the phase; `error` names the exception that ended it."""
        seconds = time.perf_counter() - self._ticks
        record: dict[str, Any] = {
            "name": self.name,
            "step": self.step,
            "start": round(self._start, 6),
            "end": round(self._start + seconds, 6),
            "seconds": round(seconds, 6),
            "depth": self._depth,
        }
        if error:
            record["error"] = error
        self._record_of(record)


class Timeline:
    """Records phases as context managers. Nesting is tracked per thread and per task."""

    def __init__(self, path: str | Path) -> None:
        self._writer = JsonlWriter(path)
        self._sums: dict[int, dict[str, float]] = {}
        self._lock = threading.Lock()
        # (name, step) of the open phases, outermost first
        self._open: ContextVar[tuple[tuple[str, int | None], ...]] = ContextVar(
            "phases", default=()
        )

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Record the `with` block as a phase. `step` defaults to the enclosing phase's step."""
        span = self.begin(name, step)
        before = self._open.set((*self._open.get(), (span.name, span.step)))
        error = ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self._open.reset(before)
            span.end(error=error)

    def begin(self, name: str, step: int | None = None) -> Span:
        """Start a phase that may overlap with others. The caller must end it. `step` defaults to
        the enclosing phase's step."""
        around = self._open.get()
        outer, outer_step = around[-1] if around else (WHOLE_STEP, None)
        full = name if outer == WHOLE_STEP else f"{outer}/{name}"
        if step is None:
            step = outer_step
        return Span(full, step, len(around), self._record)

    def step_seconds(self, step: int) -> dict[str, float]:
        """Return the seconds spent in each finished phase of a step, keyed by phase. Repeated
        phases are summed."""
        with self._lock:
            return dict(self._sums.get(step, {}))

    def metrics(self, step: int) -> dict[str, float]:
        """Return `step_seconds` as metrics: `timing_s/NAME`."""
        return {f"timing_s/{name}": seconds for name, seconds in self.step_seconds(step).items()}

    def truncate_after(self, step: int) -> None:
        """Remove the phases of later steps. Called on resume, so that repeated steps are recorded
        only once."""
        self._writer.keep(lambda record: record.get("step") is None or record["step"] <= step)
        with self._lock:
            self._sums = {at: sums for at, sums in self._sums.items() if at <= step}

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _record(self, record: dict[str, Any]) -> None:
        self._writer.write(record)
        name = record["name"]
        step = record["step"]
        if step is not None:
            with self._lock:
                sums = self._sums.setdefault(step, {})
                sums[name] = sums.get(name, 0.0) + record["seconds"]
                while len(self._sums) > _STEPS_HELD:
                    del self._sums[next(iter(self._sums))]


def read_timeline(
    path: str | Path, skipped: list[int] | None = None, most_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Return the records of a timeline file, ordered by end time. Takes the same arguments and
    raises the same errors as `read_jsonl`."""
    records: list[dict[str, Any]] = []
    for record in read_jsonl(path, skipped, most_bytes):
        name = record.get("name")
        seconds = record.get("seconds")
        if isinstance(name, str) and isinstance(seconds, int | float):
            records.append(record)
    return records
