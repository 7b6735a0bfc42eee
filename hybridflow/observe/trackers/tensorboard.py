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

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.trackers.base import RESERVED, Phase, tracker


@tracker("tensorboard", in_driver=True)
class TensorBoardTracker:
    """Writes event files in `tensorboard/`. The first scalar creates the folder and imports
    tensorboard."""

    _count = itertools.count()

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard"
        self._metrics = run_dir / "metrics.jsonl"
        self._records: Any = None

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Write the scalars of one step and flush, so that an open TensorBoard shows them."""
        self._write(step, wall_time, metrics)
        self._records.flush()

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Rewrite the earlier records from metrics.jsonl. If that file is missing, TensorBoard
        itself drops the older of duplicate records."""
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

    def _write(self, step: int, wall_time: float, scalars: Mapping[str, float | None]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._open()
        values = []
        for tag, value in scalars.items():
            values.append(Summary.Value(tag=tag, simple_value=math.nan if value is None else value))
        self._records.write(
            Event(step=step, wall_time=wall_time, summary=Summary(value=values)).SerializeToString()
        )

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Zero-padded, because TensorBoard reads a folder's files in name order.
        path = (
            self._folder
            / f"events.out.tfevents.{int(now):010d}.{os.getpid()}.{next(self._count):04d}"
        )
        self._records = RecordWriter(path.open("xb"))
        self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
