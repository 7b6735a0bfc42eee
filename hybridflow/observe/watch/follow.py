"""A JSON Lines file that another process appends to, read incrementally."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybridflow.config.outside_text import is_inside
from hybridflow.observe.jsonl import MOST_LINE_BYTES, parse_line
from hybridflow.observe.run_folder import MOST_RECORDS

_MOST_READ_BYTES = 16 << 20  # at a time
_MOST_BYTES = 128 << 20  # of a file
_TAIL_BYTES = 256


class Follower:
    """Reads the appended lines of a file inside a run folder.

    Attributes:
        skipped: number of lines that are not complete records.
        remark: why the rest of the file is not read; empty if it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self.remark = ""
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._in_long_line = False
        self._left = MOST_RECORDS
        self._tail = b""  # the last bytes before the offset

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return the records appended since the last call, at most 16 MiB of them.

        Returns:
            (restarted, records): restarted is True if the file was replaced, truncated (for example
            by a resumed run) or deleted. All earlier records are then invalid.
        """
        try:
            status = self._status()
        except (OSError, ValueError) as error:
            restarted = self._file is not None
            self._restart(None)
            self.remark = "" if isinstance(error, FileNotFoundError) else f"not readable ({error})"
            return restarted, []
        identity = (status.st_dev, status.st_ino)
        restarted = self._file is not None and (
            identity != self._file or status.st_size < self._offset
        )
        if restarted or self._file is None:
            self._restart(identity)
        end = min(status.st_size, _MOST_BYTES)
        self.remark = ""
        if status.st_size > _MOST_BYTES:
            self.remark = (
                f"only the first {_MOST_BYTES >> 20} MiB of {status.st_size >> 20} MiB are shown"
            )
        if self._left == 0:
            self.remark = f"has more than {MOST_RECORDS:,} records; later ones are skipped"
        if end <= self._offset or self._left == 0:
            return restarted, []
        found = self._appended(end)
        if found is None:  # a new file that reuses the inode number
            self._restart(identity)
            return True, self.read()[1]
        return restarted, found

    def _appended(self, end: int) -> list[dict[str, Any]] | None:
        """Read from the last position to `end`. Returns None if the data read before has
        changed."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                tail = file.read(len(self._tail))
                data = file.read(min(end - self._offset, _MOST_READ_BYTES))
        except OSError as error:
            self.remark = f"not readable ({error.strerror})"
            return []
        return self._records(data) if tail == self._tail else None

    def _status(self) -> os.stat_result:
        if not is_inside(self.path, self.path.parent):
            raise ValueError("not followed, because it links to a file outside the run folder")
        status = self.path.stat()
        if not self.path.is_file():  # a pipe would block, and a device would never end
            raise ValueError("not a regular file")
        return status

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self._file = identity
        self._offset = 0
        self._in_long_line = False
        self._tail = b""
        self._left = MOST_RECORDS
        self.skipped = 0

    def _records(self, data: bytes) -> list[dict[str, Any]]:
        whole, newline, rest = data.rpartition(b"\n")
        if not newline:
            if len(rest) >= MOST_LINE_BYTES or self._in_long_line:
                # longer than any record: skipped without being kept
                self._offset += len(rest)
                self._tail = rest[-_TAIL_BYTES:]
                self.skipped += not self._in_long_line
                self._in_long_line = True
            return []
        self._offset += len(whole) + 1
        self._tail = (whole + newline)[-_TAIL_BYTES:]
        lines = whole.split(b"\n")
        if self._in_long_line:
            del lines[0]
            self._in_long_line = False
        found: list[dict[str, Any]] = []
        for line in lines:
            if len(found) == self._left:
                break
            record = parse_line(line.decode("utf-8", errors="replace"))
            if record is None:
                self.skipped += 1
            else:
                found.append(record)
        self._left -= len(found)
        return found
