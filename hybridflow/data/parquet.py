"""Reading parquet rows with checks: every complaint names the file, the column, the row and what was expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import iter_parquet
from hybridflow.errors import DataError


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
    number = 0
    for batch in iter_parquet(path, required, optional):
        for values in zip(*(batch[name] for name in batch.columns), strict=True):
            yield Row(str(path), number, dict(zip(batch.columns, map(_plain, values), strict=True)))
            number += 1


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
