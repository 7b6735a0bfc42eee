"""Readers of data files that validate their input. Every error names the file, row and column, and
the expected value."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hybridflow.batch import iter_parquet, parquet_rows
from hybridflow.config.outside_json import parse_outside_json
from hybridflow.errors import DataError, naming

_MOST_ROW_BYTES = 256 << 20  # the tests of a program may have tens of MB


@dataclass(frozen=True)
class Row:
    """A row of a file: its position, and its values keyed by column."""

    path: str
    number: int
    values: Mapping[str, Any]

    def malformed(self, column: str, expected: str) -> DataError:
        """Return a DataError for an unexpected value in a column of this row."""
        found = repr(self.values.get(column))
        shown = found if len(found) <= 120 else found[:120] + "..."
        return DataError(
            f"{self.path}, row {self.number}, column {column!r}: expected {expected}, found {shown}"
        )

    def text(self, column: str) -> str:
        """Return the value of a column, which must be a string."""
        value = self.values[column]
        if not isinstance(value, str):
            raise self.malformed(column, "a string")
        return value

    def messages(self, column: str, parts: bool = False) -> list[dict[str, Any]]:
        """Return the value of a column of chat messages, without the fields that Arrow filled with
        null. With `parts`, the content of a message may be a list of parts, [{type: string, ...},
        ...]."""
        value = self.values[column]
        expected = "a non-empty list of chat messages {role: string, content: string}"
        if not isinstance(value, list) or not value:
            raise self.malformed(column, expected)
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.malformed(column, expected)
            content = message.get("content")
            if isinstance(content, str) or (parts and _are_parts(content)):
                continue
            if _are_parts(content):
                expected += "; set data.image_key for messages with parts"
            raise self.malformed(column, expected)
        return list(map(_without_nulls, value))

    def mapping(self, column: str) -> dict[str, Any]:
        """Return the value of an optional struct column; {} if the column or value is missing."""
        value = self.values.get(column)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.malformed(column, "a struct")
        return value


def read_rows(
    path: str | Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the rows of a data file, restricted to the named columns.

    The suffix determines the format: parquet, jsonl (one object per line), json (a list of objects,
    or one object per line), csv (with a header; all values are strings) or arrow (an IPC file or
    stream). Any other file is read as parquet.

    Raises:
        DataError: the file is missing, incomplete or not in the expected format, or lacks a
            required column.
    """
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        yield from _parquet_rows(path, required, optional)
        return
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    with naming(Path(path)):
        for number, values in enumerate(reader(Path(path))):
            if missing := [name for name in required if name not in values]:
                columns = ", ".join(map(str, values)) or "no columns"
                raise DataError(
                    f"{path}, row {number}: column {', '.join(map(repr, missing))} is missing; it "
                    f"has {columns}"
                )
            yield Row(
                str(path),
                number,
                {name: values[name] for name in (*required, *optional) if name in values},
            )


def count_rows(path: str | Path) -> int:
    """Return the row count of a data file. Raises the same errors as `read_rows`."""
    if Path(path).suffix not in _READERS:
        return parquet_rows(path)
    return sum(1 for _ in read_rows(path, ()))


def _parquet_rows(
    path: str | Path, required: Sequence[str], optional: Sequence[str]
) -> Iterator[Row]:
    number = 0
    for batch in iter_parquet(path, required, optional):
        for values in zip(*(batch[name] for name in batch.columns), strict=True):
            yield Row(str(path), number, dict(zip(batch.columns, map(_plain, values), strict=True)))
            number += 1


def _are_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    )


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message without null fields, also in the parts of its content."""
    kept = _given(message)
    if isinstance(kept["content"], list):
        kept["content"] = list(map(_given, kept["content"]))
    return kept


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in fields.items() if item is not None}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as stream:
        lines = iter(partial(stream.readline, _MOST_ROW_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) == _MOST_ROW_BYTES:
                raise DataError(
                    f"{path}, line {number}: a row must be smaller than {_MOST_ROW_BYTES >> 20} MiB"
                )
            if line.strip():
                yield _object(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _json(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as stream:
        start = stream.read(1 << 12).lstrip()[:1]
    if start != b"[":
        yield from _json_lines(path)
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if path.stat().st_size > memory // 2:
        raise DataError(
            f"{path}: is larger than half of this machine's memory; write one object per line "
            "(jsonl) so that it can be read line by line"
        )
    for number, item in enumerate(_parsed(path.read_bytes(), str(path))):
        yield _object(item, f"{path}, row {number}")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_outside_json(text)
    except ValueError as error:
        reason = str(error).removeprefix("not JSON: ")
        raise DataError(f"{where}: not valid JSON ({reason})") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: expected an object with the columns of a row, found {str(value)[:80]!r}"
        )
    return value


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for row in csv.DictReader(stream, strict=True):
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}: a row has a different number of values than the header: "
                        f"{str(row)[:120]}"
                    )
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable csv file: {error}") from error


def _arrow(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pa.memory_map(str(path)) as source:
            opened = pa.ipc.open_file(source) if source.read(6) == b"ARROW1" else None
            source.seek(0)
            numbers = range(opened.num_record_batches) if opened else ()
            for batch in map(opened.get_batch, numbers) if opened else pa.ipc.open_stream(source):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Arrow file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".arrow": _arrow,
}
