"""Recording of a process's calls and their durations, for `hybridflow timeline`.

Each process appends JSON lines to a file next to its log, `actor-rank0.spans.jsonl`. When a process
starts, it first writes a line with its name and machine. The other lines look like this:

    {"name": "update_policy", "start": 1764255600.1, "seconds": 0.8, "thread": "main"}
    {"counter": "requests of engine-0", "at": 1764255600.1, "value": 64}
    {"mark": "no answer from rank 1", "at": 1764255600.1}
    {"clock": "actor rank 4", "ahead": 0.0012, "within": 0.0003}

`start` and `at` are Unix times of the machine's own clock, and `seconds` comes from a monotonic
clock. A `clock` line records by how many seconds another machine's clock is ahead of this one, and
the error of that measurement.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

SUFFIX = ".spans.jsonl"
_MOST_BYTES = 32 << 20  # at this size the file is rotated; the previous one is kept
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SpanFile:
    """The spans of one process. Thread-safe. Each line is written immediately, because a run's
    processes may be killed by SIGKILL.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self._process = process
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._file: TextIO | None = None
        self._is_over = False

    def span(self, name: str, start: float, seconds: float) -> None:
        """Record a finished span of the current thread."""
        thread = threading.current_thread()
        own = "main" if thread is threading.main_thread() else thread.name
        times = {"start": round(start, 6), "seconds": round(seconds, 6)}
        self.write({"name": name, **times, "thread": own})

    def count(self, name: str, value: float) -> None:
        """Record the value of a counter if it has changed."""
        if self._values.get(name, 0) != value:
            self._values[name] = value
            self.write({"counter": name, "at": round(unix_time(), 6), "value": value})

    def mark(self, name: str) -> None:
        """Record an event without duration."""
        self.write({"mark": name, "at": round(unix_time(), 6)})

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. After an error, such as a full disk, recording stops and the error is
        printed to the process's log.
        """
        with self._lock:
            if self._is_over:
                return
            try:
                self._file = self._file or self._open()
                self._file.write(json.dumps(record) + "\n")
                if self._file.tell() > _MOST_BYTES:
                    self._file.close()
                    self.path.replace(self.path.with_suffix(".jsonl.1"))
                    self._file = None
            except OSError as error:
                self._is_over = True
                with suppress(OSError):  # the log may be on the same disk
                    print(f"{self.path}: no further spans are recorded: {error}", file=sys.stderr)

    def close(self) -> None:
        """Close the file. Later records are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._is_over = True

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        facts = {"process": self._process, "pid": os.getpid(), "boot": boot_id()}
        file.write(json.dumps({**facts, "at": round(unix_time(), 6)}) + "\n")
        return file


_current: SpanFile | None = None


def record_to(path: Path, process: str) -> SpanFile:
    """Record the spans of this process in `path`. `process` is its name in the timeline."""
    global _current  # one per process, like its log
    _current = SpanFile(path, process)
    return _current


def current() -> SpanFile | None:
    """Return the file of this process; None if it records no spans."""
    return _current


@contextmanager
def span(name: str, least_s: float = 0.0) -> Iterator[None]:
    """Record the `with` block as a span if this process records spans and the block took at least
    `least_s` seconds.
    """
    file = _current
    if file is None:
        yield
        return
    start = unix_time()
    ticks = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - ticks
        if seconds >= least_s:
            file.span(name, start, seconds)


def count(name: str, value: float) -> None:
    """Record the value of a counter, if this process records spans."""
    if _current is not None:
        _current.count(name, value)


def unix_time() -> float:
    """Return the Unix time of this machine."""
    return time.time()


def boot_id() -> str:
    """Return an id of this machine's current boot. Processes with the same id share a clock."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def ahead(before: float, there: float, after: float) -> tuple[float, float]:
    """Return (seconds by which another clock is ahead of this one, maximum error). `there` is the
    other clock's time, read between `before` and `after` on this one (Cristian 1989). The maximum
    error is half of the round-trip time.
    """
    half = (after - before) / 2
    return there - before - half, half
