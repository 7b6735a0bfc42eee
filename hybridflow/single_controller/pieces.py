"""What crosses between processes when columns stay in the object store. Plain data and numpy: needs no Ray.

A rank that returns a batch returns a `Header` and its columns in one or several objects. A rank that is given such
columns is given a
`Recipe`: which objects, which column of them, which of their rows, in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.batch.blocks import take_blocks
from hybridflow.batch.columns import lengths_of


@dataclass(frozen=True)
class Header:
    """One rank's result without its columns: `nbytes` of each, and row lengths of the jagged ones."""

    rows: int
    nbytes: Mapping[str, int]
    lengths: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]
    small: (
        DataProto  # the columns that the driver is given at once; they are in the store nevertheless, for other groups
    )

    @classmethod
    def of(cls, batch: DataProto, inline_bytes: int = 0) -> Header:
        """What the driver is told about `batch`, with the columns of up to `inline_bytes`."""
        sizes = {name: column.nbytes for name, column in batch.items()}
        found = {name: lengths_of(column) for name, column in batch.items()}
        lengths = {name: each for name, each in found.items() if each is not None}
        small = batch.select(name for name, nbytes in sizes.items() if nbytes <= inline_bytes)
        return cls(len(batch), sizes, lengths, dict(batch.meta), small)


@dataclass(frozen=True)
class At:
    """In place of an argument: its position among the objects sent along."""

    position: int


@dataclass(frozen=True)
class Request:
    """One call on its way to one rank. One value, because each argument of a Ray call is serialized by itself."""

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
    """A column as rows of stored parts: `sources` are positions among the objects sent along and the column's name in
    each, `index` the rows of all parts end to end.
    """

    name: str
    sources: tuple[tuple[int, str], ...]
    index: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """A batch argument: `local` columns as they are, the others from stored parts, in the order of `names`."""

    local: DataProto | int  # an int: position among the objects sent along
    columns: tuple[ColumnRecipe, ...]
    names: tuple[str, ...]

    def build(self, objects: Sequence[Any]) -> DataProto:
        """The batch, from the objects sent along."""
        batch = objects[self.local] if isinstance(self.local, int) else self.local
        for column in self.columns:
            found = assemble([objects[at].select([name]) for at, name in column.sources], column.index).fetch()
            batch = batch.union(found.rename({found.columns[0]: column.name}))
        return batch.select(self.names)


def _built(value: Any, objects: Sequence[Any]) -> Any:
    if isinstance(value, At):
        return objects[value.position]
    return value.build(objects) if isinstance(value, Recipe) else value


def assemble(parts: Sequence[DataProto], index: np.ndarray) -> DataProto:
    """The rows at `index` `[K]` of all parts (of one column each) laid end to end, as views or `Blocks` of views where
    they can be, else picked from them.

    Raises:
        IndexError: the parts hold fewer rows than was agreed.
        SchemaError: the parts are not of one type.
    """
    first, name = parts[0], parts[0].columns[0]
    if any(not first.is_like(part) for part in parts[1:]):
        DataProto.concat([part.rows(slice(0, 0)) for part in parts])  # says what differs; copies nothing
    column = take_blocks([part.blocks(name)[0] for part in parts], index)
    return DataProto({name: column}, first.meta, first.bfloat16)
