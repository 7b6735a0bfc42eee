"""Messages between processes for columns that stay in the object store. Uses plain data and numpy,
without Ray.

A rank that returns a batch sends a `Header` and puts the columns into one or more objects. A rank
that receives such columns gets a `Recipe`, which lists the objects, the column to read from each,
and the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged


@dataclass(frozen=True)
class Header:
    """One rank's result without its columns.

    Args:
        rows, meta: number of rows and metadata of the batch.
        nbytes: size of each column.
        lengths: row lengths of the jagged columns.
        small: columns that are sent to the driver with the header. They are also in the store,
            where other groups read them.
    """

    rows: int
    meta: Mapping[str, Any]
    nbytes: Mapping[str, int]
    lengths: Mapping[str, np.ndarray]
    small: DataProto

    @classmethod
    def of(cls, batch: DataProto, inline_bytes: int = 0) -> Header:
        """Build the header of `batch`, including all columns of at most `inline_bytes`."""
        sizes = {name: column.nbytes for name, column in batch.items()}
        lengths = {
            name: column.lengths for name, column in batch.items() if isinstance(column, Jagged)
        }
        small = batch.select(name for name, nbytes in sizes.items() if nbytes <= inline_bytes)
        return cls(len(batch), dict(batch.meta), sizes, lengths, small)


@dataclass(frozen=True)
class At:
    """Placeholder for an argument that is sent as a separate object, at this position in the list
    of objects.
    """

    position: int


@dataclass(frozen=True)
class Request:
    """A call to one rank. It is a single value because Ray serializes each argument separately."""

    method: str
    values: tuple[Any, ...]  # arguments; At and Recipe refer to objects sent along
    keywords: tuple[str, ...]  # names of the last arguments

    def arguments(self, objects: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments."""
        built = [_built(value, objects) for value in self.values]
        positional = len(built) - len(self.keywords)
        return built[:positional], dict(zip(self.keywords, built[positional:], strict=True))


@dataclass(frozen=True)
class ColumnRecipe:
    """Instructions for assembling a column from rows of stored parts.

    Args:
        name: name of the column in the batch.
        sources: for each part, the position of its object among the objects sent with the call, and
            the column's name in that object.
        index: `[B]` row indices into the concatenation of all parts.
    """

    name: str
    sources: tuple[tuple[int, str], ...]
    index: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """Instructions with which the receiver assembles a batch argument. `local` columns are
    included; the others are gathered from stored parts. `names` is the column order.
    """

    local: DataProto | int  # an int is a position among the objects sent along
    columns: tuple[ColumnRecipe, ...]
    names: tuple[str, ...]

    def build(self, objects: Sequence[Any]) -> DataProto:
        """Build the batch from the objects sent with the call."""
        batch = objects[self.local] if isinstance(self.local, int) else self.local
        for column in self.columns:
            parts = [
                objects[at].select([name]).rename({name: column.name})
                for at, name in column.sources
            ]
            batch = batch.union(gather(parts, column.index))
        return batch.select(self.names)


def _built(value: Any, objects: Sequence[Any]) -> Any:
    if isinstance(value, At):
        return objects[value.position]
    return value.build(objects) if isinstance(value, Recipe) else value


def gather(parts: Sequence[DataProto], index: np.ndarray) -> DataProto:
    """Return the rows at `index` `[K]` of the concatenation of all parts. Consecutive rows of one
    part are views.

    Raises:
        IndexError: an index exceeds the number of rows in the parts.
        SchemaError: the parts have different column types.
    """
    starts = np.cumsum([0, *map(len, parts)])
    if len(index) and int(index.max()) >= starts[-1]:
        raise IndexError(
            f"row {int(index.max())} is out of range: the parts have {starts[-1]} rows"
        )
    part_of = np.searchsorted(starts, index, side="right") - 1
    taken = DataProto.concat(
        [part.rows(index[part_of == i] - starts[i]) for i, part in enumerate(parts)]
    )
    return taken.reorder(np.argsort(np.argsort(part_of, kind="stable")))
