"""TensorBoard scalars without TensorFlow or torch: event records are written directly to a file.

TensorBoard's own EventFileWriter is not used, because it tries to import TensorFlow, starts a
thread, and includes the host name in the file name.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.observe.append_only import read_distributions
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.trackers.base import RESERVED, Phase, tracker

_BINS = 30
_FOLDERS = {"train": "rollouts*", "val": "validation*"}  # of the dumps of a phase


@tracker("tensorboard", in_driver=True)
class TensorBoardTracker:
    """Writes event files in `tensorboard/`. The first scalar creates the folder and imports
    tensorboard."""

    _count = itertools.count()

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard"
        self._metrics = run_dir / "metrics.jsonl"
        self._records: Any = None
        self._distributions: dict[Path, Any] = {}  # by folder

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Write the scalars of one step and flush the file, so that a running TensorBoard shows
        them."""
        self._write(step, wall_time, metrics)
        self._records.flush()

    def rollouts(self, step: int, path: Path) -> None:
        """Write a dump's distributions to a subfolder for its kind, which TensorBoard shows as a
        separate run.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for column, found in read_distributions(path).items():
            if len(found):
                tag = f"{path.parent.name}/{column}"
                values.append(Summary.Value(tag=tag, histo=_histogram(found)))
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        folder = self._folder / path.parent.name
        if folder not in self._distributions:
            self._distributions[folder] = self._open(folder)
        records = self._distributions[folder]
        records.write(event.SerializeToString())
        records.flush()

    def report(self, path: Path) -> None:
        """Do nothing, because TensorBoard cannot show HTML pages."""

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Rewrite the earlier records from metrics.jsonl. If that file is missing, TensorBoard
        itself drops the older of duplicate records."""
        if phase in _FOLDERS:
            for folder in self._folder.glob(_FOLDERS[phase]):
                self._forget_after(folder, step)
        if not self._metrics.exists():
            return
        self.close()
        old = sorted(self._folder.glob("events.out.tfevents.*"))
        for record in read_jsonl(self._metrics):
            late = record.get("phase") == phase and record.get("step", 0) > step
            if not late and "step" in record and "wall_time" in record:
                scalars = {}
                for name, value in record.items():
                    if name not in RESERVED:
                        scalars[name] = value
                self._write(record["step"], record["wall_time"], scalars)
        if self._records is not None:
            self._records.flush()
        # not earlier, so that a kill in between duplicates records but loses none
        for path in old:
            path.unlink()

    def close(self) -> None:
        """Close the event file. A later `log` starts a new one, which TensorBoard reads after this
        one."""
        if self._records is not None:
            self._records.close()
            self._records = None
        while self._distributions:
            _, records = self._distributions.popitem()
            records.close()

    def _write(self, step: int, wall_time: float, scalars: Mapping[str, float | None]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._records = self._open(self._folder)
        values = []
        for tag, value in scalars.items():
            number = math.nan if value is None else value
            values.append(Summary.Value(tag=tag, simple_value=number))
        event = Event(step=step, wall_time=wall_time, summary=Summary(value=values))
        self._records.write(event.SerializeToString())

    def _forget_after(self, folder: Path, step: int) -> None:
        """Write a marker that makes TensorBoard drop the later steps that it has already read."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        mark = Event(step=step + 1, wall_time=time.time())
        mark.session_log.status = SessionLog.START
        earlier = self._distributions.pop(folder, None)
        if earlier is not None:
            earlier.close()
        records = self._open(folder)
        records.write(mark.SerializeToString())
        records.close()

    def _open(self, folder: Path) -> Any:
        """Start a new event file in a folder, and return its writer."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Zero-padded, because TensorBoard reads a folder's files in name order.
        number = next(self._count)
        path = folder / f"events.out.tfevents.{int(now):010d}.{os.getpid()}.{number:04d}"
        records = RecordWriter(path.open("xb"))
        version = Event(wall_time=now, file_version="brain.Event:2")
        records.write(version.SerializeToString())
        return records


def _histogram(values: np.ndarray) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    counts, edges = np.histogram(values, bins=_BINS)
    return HistogramProto(
        min=float(values.min()),
        max=float(values.max()),
        num=len(values),
        sum=float(values.sum()),
        sum_squares=float((values**2).sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
