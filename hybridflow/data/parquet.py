"""Reading parquet rows with checks: every complaint names the file, the column, the row and what was expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.errors import DataError

_MARK = b"PAR1"
_BATCH_ROWS = 4096  # rows turned into Python objects at a time


@dataclass(frozen=True)
class Row:
    """One row of a file: its values by column, and where it came from."""

    path: str
    number: int
    values: Mapping[str, Any]

    def malformed(self, column: str, expected: str) -> DataError:
        """The error for a value that is not what was expected."""
        found = repr(self.values.get(column))
        shown = found if len(found) <= 120 else found[:120] + "..."
        return DataError(f"{self.path}, row {self.number}, column {column!r}: expected {expected}, found {shown}")

    def text(self, column: str) -> str:
        """The value of a column of strings."""
        value = self.values[column]
        if not isinstance(value, str):
            raise self.malformed(column, "a string")
        return value

    def messages(self, column: str) -> list[dict[str, Any]]:
        """The value of a column of chat messages; fields that Arrow filled with null are left out."""
        value = self.values[column]
        expected = "a non-empty list of chat messages {role: string, content: string}"
        if not isinstance(value, list) or not value:
            raise self.malformed(column, expected)
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise self.malformed(column, expected)
        return [{key: item for key, item in message.items() if item is not None} for message in value]

    def mapping(self, column: str) -> dict[str, Any]:
        """The value of an optional column of structs; {} when the column or value is missing."""
        value = self.values.get(column)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.malformed(column, "a struct")
        return value


def read_rows(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the rows of a parquet file with the named columns.

    Raises:
        DataError: the file is missing, is not (whole) parquet, or lacks a required column.
    """
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in required if name not in present]
            if missing:
                raise DataError(
                    f"{path}: column {', '.join(map(repr, missing))} is missing; the file has "
                    f"{', '.join(present) or 'no columns'}"
                )
            columns = [*required, *(name for name in optional if name in present)]
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for values in batch.to_pylist():
                    yield Row(str(path), number, values)
                    number += 1
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {_why_unreadable(Path(path), error)}") from error


def _why_unreadable(path: Path, error: Exception) -> str:
    """A parquet file begins and ends with its mark; what begins otherwise is a file of another kind."""
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
    except OSError:
        return str(error)
    if start and not start.startswith(_MARK):
        kind = "JSON lines" if start.lstrip().startswith(b"{") else "another format"
        return f"it begins with {start!r}, so it is {kind}; convert it, for example with pandas' DataFrame.to_parquet"
    return f"it is empty or truncated, write it again ({error})"
