"""A run folder that is read while the run writes to it. The run's processes are not contacted."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.observe.metric_records import MetricRecords, is_span, of_numbers
from hybridflow.observe.run_folder import CHANGES, RunFolder, absent, read_about
from hybridflow.observe.watch.follow import Follower

_MOST_SPANS = 250_000
_REPLACED = ("config.yaml", "summary.json", "environment.json", CHANGES)
_Signature = tuple[tuple[int, int, int] | None, ...]


class LiveRun:
    """The current contents of a run folder, except its dumps.

    Attributes:
        run: a snapshot. Its lists may grow, but nothing else in it changes.
        version: increases whenever `run` changes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        self._about = read_about(path)
        self._signature: _Signature = self._signatures()
        self._metrics = MetricRecords()
        self._spans: list[dict[str, Any]] = []
        self._metrics_file = Follower(path / "metrics.jsonl")
        self._timeline_file = Follower(path / "timeline.jsonl")
        self._lock = threading.Lock()
        self.run = self._about
        self.poll()

    def poll(self) -> bool:
        """Read the data written since the last call. Returns True if there was any."""
        with self._lock:
            changed = self._read_replaced()
            while self._read_metrics():
                changed = True
            while self._read_timeline():
                changed = True
            if changed or self.version == 0:
                self.run = self._snapshot()
                self.version += 1
            return changed

    def _signatures(self) -> _Signature:
        found: list[tuple[int, int, int] | None] = []
        for name in _REPLACED:
            try:
                status = (self.path / name).stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _read_replaced(self) -> bool:
        signature = self._signatures()
        if signature == self._signature:
            return False
        self._signature = signature
        self._about = read_about(self.path)
        return True

    def _read_metrics(self) -> bool:
        restarted, records = self._metrics_file.read()
        if restarted:
            self._metrics = MetricRecords()
        for record in records:
            if not self._metrics.add(record):
                break
        return restarted or bool(records)

    def _read_timeline(self) -> bool:
        restarted, records = self._timeline_file.read()
        if restarted:
            self._spans = []
        for record in records:
            if is_span(record) and len(self._spans) < _MOST_SPANS:
                self._spans.append(of_numbers(record))
        return restarted or bool(records)

    def _snapshot(self) -> RunFolder:
        run = replace(self._about, metrics=self._metrics.records, timeline=self._spans)
        run.missing = [*self._about.missing, *self._metrics.remarks()]
        for file in (self._metrics_file, self._timeline_file):
            if file.remark:
                run.missing.append(f"{file.path.name}: {file.remark}")
            if file.skipped:
                run.missing.append(
                    f"{file.path.name}: skipped {file.skipped} lines that are not complete records"
                )
        run.missing += absent(run)
        return run
