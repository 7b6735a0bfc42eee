"""What crosses between processes when columns stay in the object store. Plain data and numpy: needs no Ray.

A rank that returns a batch returns a `Header` and each column as an object of its own. A rank that is given such columns is given a
`Recipe`: which objects, which of their rows, in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.jagged import Jagged
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class Header:
    """One rank's result without its columns: `nbytes` of each, and row lengths of the jagged ones."""

    rows: int
    nbytes: Mapping[str, int]
    lengths: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, batch: DataProto) -> Header:
        """What the driver is told about `batch`."""
        sizes = {name: column.nbytes for name, column in batch.items()}
        lengths = {name: column.lengths for name, column in batch.items() if isinstance(column, Jagged)}
        return cls(len(batch), sizes, lengths, dict(batch.meta))


@dataclass(frozen=True)
class ColumnRecipe:
    """A column as rows of stored parts: `sources` are positions among the objects sent along, `index` the rows of all parts end to end."""

    name: str
    sources: tuple[int, ...]
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
            found = assemble([objects[at] for at in column.sources], column.index)
            batch = batch.union(found.rename({found.columns[0]: column.name}))
        return batch.select(self.names)


def assemble(parts: Sequence[DataProto], index: np.ndarray) -> DataProto:
    """The rows at `index` `[K]` of all parts laid end to end. What lies in one piece is not copied.

    Raises:
        IndexError: a part holds fewer rows than was agreed.
    """
    starts = np.cumsum([0, *(len(part) for part in parts)])
    if len(index) and int(index.max()) >= starts[-1]:
        raise IndexError(f"row {int(index.max())} of stored parts of {starts[-1]} rows")
    part_of = np.searchsorted(starts, index, side="right") - 1
    turns = np.flatnonzero((np.diff(index) != 1) | (np.diff(part_of) != 0)) + 1
    if len(turns) > 4 * len(parts):
        return DataProto.concat(parts).rows(index)
    pieces = []
    for run in np.split(np.arange(len(index)), turns) if len(index) else []:
        at, first = int(part_of[run[0]]), int(index[run[0]])
        pieces.append(parts[at].rows(slice(first - int(starts[at]), first - int(starts[at]) + len(run))))
    return DataProto.concat(pieces) if pieces else parts[0].rows(slice(0, 0))
