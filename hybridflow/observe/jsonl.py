"""JSON Lines files that survive a killed process: lines are appended atomically, damaged lines are
skipped and counted, and a resumed run truncates the file."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hybridflow.errors import DataError

MOST_LINE_BYTES = 16 << 20
_RANGES_SHOWN = 6
_log = logging.getLogger(__name__)


def finite(value: Any) -> Any:
    """Replace non-finite numbers in plain data with None, since JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return list(map(finite, value)) if isinstance(value, list | tuple) else value


class JsonlWriter:
    """Appends JSON objects, one per line, and flushes each. A truncated last line left by a killed
    process is removed when the file is opened."""

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
                self._file = self.path.open(
                    "a", encoding="utf-8", errors="backslashreplace", buffering=1
                )
            self._file.write(line)
            self._file.flush()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove damaged lines and the records for which `wanted` is false."""
        with self._lock:
            self._close()
            _keep_records(self.path, wanted)

    def close(self) -> None:
        """Close the file; a later `write` reopens it."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()


def read_jsonl(
    path: str | Path, skipped: list[int] | None = None, most_bytes: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in order. A missing file yields nothing.

    Args:
        skipped: receives the 1-based number of each line that is not a complete JSON object.
        most_bytes: stop after the line that contains this byte offset.

    Raises:
        DataError: the path is not a regular file.
    """
    path = Path(path)
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe would block, and reading a device would never end
        raise DataError(f"{path}: not a regular file")
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, most_bytes), 1):
            record = None if line is None else parse_line(line.decode("utf-8", errors="replace"))
            if record is not None:
                yield record
            elif skipped is not None:
                skipped.append(number)


def number_ranges(numbers: Iterable[int]) -> str:
    """Format sorted integers as ranges, such as `3, 7-9`. Only the first few ranges are listed,
    followed by the count of the remaining integers.
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    left = sum(last - first + 1 for first, last in ranges[_RANGES_SHOWN:])
    shown = []
    for first, last in ranges[:_RANGES_SHOWN]:
        shown.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _lines(file: BinaryIO, most_bytes: float) -> Iterator[bytes | None]:
    """Yield the lines in the first `most_bytes` of a file, with None in place of each line that
    exceeds the maximum length of a record."""
    read = 0
    while read < most_bytes and (line := file.readline(MOST_LINE_BYTES)):
        read += len(line)
        if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (
            read < most_bytes
            and (rest := file.readline(MOST_LINE_BYTES))
            and not rest.endswith(b"\n")
        ):
            read += len(rest)
        yield None


def _keep_records(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically rewrite a file with only the records for which `wanted` is true."""
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    skipped: list[int] = []
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for record in filter(wanted, read_jsonl(path, skipped)):
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            # otherwise a machine crash may leave an empty file under the final name
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if skipped:
        _log.warning("%s: %s", path, removed_lines(skipped))


def removed_lines(skipped: list[int]) -> str:
    """Return a sentence that explains a file's skipped lines."""
    return (
        f"skipped line {number_ranges(skipped)}, which is not a complete record: the run was "
        "killed while writing it, or the file was damaged"
    )


def repair(path: Path) -> None:
    """Make the file end with a complete line, so that the next record starts a new one. If a line
    is removed, logs a warning with its number."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        whole, newline, last = file.read().rpartition(b"\n")
        if parse_line(last.decode("utf-8", errors="replace")) is not None:
            file.write(b"\n")  # only the newline is missing
        else:
            file.truncate(len(whole) + len(newline))
            _log.warning("%s: %s", path, removed_lines([whole.count(b"\n") + len(newline) + 1]))


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the record of a line; None if it is not a complete JSON object."""
    try:
        record = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")
