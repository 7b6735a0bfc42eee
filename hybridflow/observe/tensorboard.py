"""TensorBoard scalars without TensorFlow or torch: event records written straight into a file.

TensorBoard's own EventFileWriter is not used: it tries to import TensorFlow, starts a thread, and puts the host's name
in the file name.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """Writes scalars to one event file in `folder`, made (and tensorboard imported) when the first scalar comes."""

    _count = itertools.count()

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._records: Any = None

    def add(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step and flush, so that a TensorBoard that is open shows them."""
        self._write(step, wall_time, scalars)
        self._records.flush()

    def replace_all(self, rows: Iterable[tuple[int, float, Mapping[str, float]]]) -> None:
        """Replace every event file of the folder with one that holds `rows` of (step, wall time, scalars)."""
        self.close()
        old = sorted(self.folder.glob("events.out.tfevents.*"))
        for step, wall_time, scalars in rows:
            self._write(step, wall_time, scalars)
        if self._records is not None:
            self._records.flush()
        for path in old:  # only now: a kill in between leaves doubles, not a loss
            path.unlink()

    def close(self) -> None:
        """Close the event file; a later `add` starts another one, which TensorBoard reads after this one."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def _write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._open()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._records.write(Event(step=step, wall_time=wall_time, summary=Summary(value=values)).SerializeToString())

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Zero-padded: TensorBoard reads the files of a folder in the order of their names.
        path = self.folder / f"events.out.tfevents.{int(now):010d}.{os.getpid()}.{next(self._count):04d}"
        self._records = RecordWriter(path.open("xb"))
        self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
