"""JSON-lines files that survive a kill: lines are appended whole, torn lines are skipped, and a resumed run cuts the
file back."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


def finite(value: Any) -> Any:
    """Plain data with None in the place of each number that is not finite: JSON has no form for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


class JsonlWriter:
    """Appends one JSON object per line and flushes each. A torn last line of a killed process is removed when the file
    is opened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                repair(self.path)
                self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(line)
            self._file.flush()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the records for which `wanted` is false, and torn lines."""
        with self._lock:
            self._close()
            _keep_records(self.path, wanted)

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order. Lines that are not a whole JSON object are skipped; a missing file has none."""
    path = Path(path)
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield record


def _keep_records(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file atomically with the records for which `wanted` is true."""
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for record in filter(wanted, read_jsonl(path)):
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def repair(path: Path) -> None:
    """Make the file end with a whole line, so that the next record starts a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        whole, newline, last = file.read().rpartition(b"\n")
        if _parse(last.decode("utf-8", errors="replace")) is not None:
            file.write(b"\n")  # only the line end is missing
        else:
            file.truncate(len(whole) + len(newline))


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
