"""What crosses between processes when columns stay in the object store: plain data and numpy, without Ray.

A rank that returns a batch returns a `Header`, and its columns in one or several objects. A rank that is given such
columns is given a `Recipe`: which objects, which column of each, and which rows of them in which order.
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
        rows, meta: of the batch.
        nbytes: size of each column.
        lengths: row lengths of the jagged columns.
        small: the columns that the driver gets at once. They are in the store as well, for other groups.
    """

    rows: int
    meta: Mapping[str, Any]
    nbytes: Mapping[str, int]
    lengths: Mapping[str, np.ndarray]
    small: DataProto

    @classmethod
    def of(cls, batch: DataProto, inline_bytes: int = 0) -> Header:
        """The header of `batch`, with the columns of up to `inline_bytes`."""
        sizes = {name: column.nbytes for name, column in batch.items()}
        lengths = {name: column.lengths for name, column in batch.items() if isinstance(column, Jagged)}
        small = batch.select(name for name, nbytes in sizes.items() if nbytes <= inline_bytes)
        return cls(len(batch), dict(batch.meta), sizes, lengths, small)


@dataclass(frozen=True)
class At:
    """Stands for an argument that is sent along: its position among those objects."""

    position: int


@dataclass(frozen=True)
class Request:
    """One call on its way to one rank. It is one value because Ray serializes each argument of a call by itself."""

    method: str
    values: tuple[Any, ...]  # arguments; At and Recipe stand for those made of objects sent along
    keywords: tuple[str, ...]  # names of the last arguments

    def arguments(self, objects: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments."""
        built = [_built(value, objects) for value in self.values]
        positional = len(built) - len(self.keywords)
        return built[:positional], dict(zip(self.keywords, built[positional:], strict=True))


@dataclass(frozen=True)
class ColumnRecipe:
    """A column as rows of stored parts.

    Args:
        name: of the column in the batch.
        sources: position among the objects sent along, and name of the column in that object, for each part.
        index: `[B]` rows of all parts laid end to end.
    """

    name: str
    sources: tuple[tuple[int, str], ...]
    index: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """A batch argument: `local` columns as they are, the others from stored parts, in the order of `names`."""

    local: DataProto | int  # an int is a position among the objects sent along
    columns: tuple[ColumnRecipe, ...]
    names: tuple[str, ...]

    def build(self, objects: Sequence[Any]) -> DataProto:
        """The batch, from the objects sent along."""
        batch = objects[self.local] if isinstance(self.local, int) else self.local
        for column in self.columns:
            parts = [objects[at].select([name]).rename({name: column.name}) for at, name in column.sources]
            batch = batch.union(gather(parts, column.index))
        return batch.select(self.names)


def _built(value: Any, objects: Sequence[Any]) -> Any:
    if isinstance(value, At):
        return objects[value.position]
    return value.build(objects) if isinstance(value, Recipe) else value


def gather(parts: Sequence[DataProto], index: np.ndarray) -> DataProto:
    """The rows at `index` `[K]` of all parts laid end to end; consecutive rows of one part are views.

    Raises:
        IndexError: the parts hold fewer rows than was agreed.
        SchemaError: the parts are not of one type.
    """
    starts = np.cumsum([0, *map(len, parts)])
    if len(index) and int(index.max()) >= starts[-1]:
        raise IndexError(f"row {int(index.max())} of parts of {starts[-1]} rows")
    part_of = np.searchsorted(starts, index, side="right") - 1
    taken = DataProto.concat([part.rows(index[part_of == i] - starts[i]) for i, part in enumerate(parts)])
    return taken.reorder(np.argsort(np.argsort(part_of, kind="stable")))
