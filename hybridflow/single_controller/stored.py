"""Columns that stay in Ray's object store, while the driver handles only references to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Column, DataProto, Deferred, Jagged
from hybridflow.errors import DataError, HybridFlowError
from hybridflow.single_controller.pieces import ColumnRecipe, Header, Recipe, gather

INLINE_BYTES = 64 << 10  # result columns up to this size are sent to the driver immediately


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's rows of a column. `ref` refers to a batch with a column `name`, described by
    `header`.
    """

    ref: Any
    name: str
    header: Header


@dataclass(frozen=True, eq=False)
class StoredColumn(Deferred):
    """A column in the object store: the rows `index` `[B]` of the concatenation of `parts`."""

    parts: tuple[Part, ...]
    index: np.ndarray

    @classmethod
    def whole(cls, part: Part) -> StoredColumn:
        """Return a column with all rows of one part."""
        return cls((part,), np.arange(part.header.rows))

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray) -> StoredColumn:
        """Select the rows at `index` `[K]`; only references are copied."""
        return StoredColumn(self.parts, self.index[index])

    def concat(self, others: Sequence[Deferred]) -> StoredColumn:
        """Append the rows of other columns to this one."""
        columns = [self, *(other for other in others if isinstance(other, StoredColumn))]
        starts = np.cumsum(
            [0, *(sum(part.header.rows for part in column.parts) for column in columns)]
        )
        index = np.concatenate(
            [column.index + start for column, start in zip(columns, starts, strict=False)]
        )
        return StoredColumn(tuple(part for column in columns for part in column.parts), index)

    def needed(self) -> StoredColumn:
        """Return the same rows, but drop the parts that contribute no rows."""
        starts = np.cumsum([0, *(part.header.rows for part in self.parts)])
        part_of = np.searchsorted(starts, self.index, side="right") - 1
        used = np.unique(part_of) if len(self.index) else np.zeros(1, np.int64)
        moved = np.zeros(len(self.parts), np.int64)
        moved[used] = (
            np.cumsum([0, *(self.parts[at].header.rows for at in used[:-1])]) - starts[used]
        )
        return StoredColumn(tuple(self.parts[at] for at in used), self.index + moved[part_of])

    def fetch(self) -> tuple[Column, bool]:
        """Fetch the rows. Raises DataError if an object was lost with its node."""
        import ray

        column = self.needed()
        try:
            objects: list[DataProto] = ray.get([part.ref for part in column.parts])
        except ray.exceptions.RayError as error:
            raise DataError(
                f"lost column {column.parts[0].name!r}: {str(error).strip().splitlines()[-1]}"
            ) from error
        name = column.parts[0].name
        alike = [
            held.select([part.name]).rename({part.name: name})
            for part, held in zip(column.parts, objects, strict=True)
        ]
        found = gather(alike, column.index)
        return found[name], name in found.bfloat16

    @property
    def lengths(self) -> np.ndarray | None:
        """Row lengths `[B]` of a jagged column, taken from the headers; None for a dense column."""
        found = [part.header.lengths.get(part.name) for part in self.parts]
        known = [lengths for lengths in found if lengths is not None]
        return np.concatenate(known)[self.index] if len(known) == len(found) else None

    @property
    def nbytes(self) -> int:
        """Size of these rows in bytes; an estimate if they include only some rows of a part."""
        rows = sum(part.header.rows for part in self.parts)
        total = sum(part.header.nbytes[part.name] for part in self.parts)
        return total * len(self.index) // max(rows, 1)


@dataclass
class Outgoing:
    """The objects sent along with a call. Batches with stored columns become recipes that refer to
    them."""

    objects: list[Any] = field(default_factory=list)
    _at: dict[Any, int] = field(default_factory=dict)

    def recipe(self, batch: DataProto, store: Callable[[Any], Any]) -> Recipe:
        """Return the recipe from which the receiver builds `batch`.

        `store` puts its local columns into the object store.
        """
        columns = []
        for name, held in batch.items():
            if isinstance(held, StoredColumn):
                column = held.needed()
                sources = tuple((self.add(part.ref), part.name) for part in column.parts)
                columns.append(ColumnRecipe(name, sources, column.index))
        local = batch.drop(column.name for column in columns)
        if local.deferred:
            raise HybridFlowError(
                f"column {local.deferred[0]!r} is not in the object store and cannot be sent"
            )
        at = self.add(store(local)) if local.nbytes > INLINE_BYTES else None
        return Recipe(local if at is None else at, tuple(columns), batch.columns)

    def add(self, ref: Any) -> int:
        """Return this object's position among the objects sent along. If it is not among them yet,
        it is appended.
        """
        if ref not in self._at:
            self._at[ref] = len(self.objects)
            self.objects.append(ref)
        return self._at[ref]


def keep_in_store(batch: DataProto) -> DataProto:
    """Move the batch's jagged columns of more than 64 KiB to the object store, so that they are
    sent only once even if several calls read them. Requires a running cluster.
    """
    import ray

    large = {
        name: column
        for name, column in batch.items()
        if isinstance(column, Jagged) and column.nbytes > INLINE_BYTES
    }
    kept = {}
    for name, column in large.items():
        alone = DataProto({name: column}, {}, batch.bfloat16 & {name})
        kept[name] = StoredColumn.whole(Part(ray.put(alone), name, Header.of(alone)))
    return DataProto({**dict(batch.items()), **kept}, batch.meta, batch.bfloat16 - set(large))


def stored_results(
    refs: Mapping[int, Mapping[str, Any]], headers: Mapping[int, Header]
) -> dict[int, DataProto]:
    """Build each rank's result: columns that every rank has sent inline, and references to all
    other columns.

    Args:
        refs: for each rank, the object that contains each column.
        headers: the header of each rank's result.
    """
    small = [set(header.small.columns) for header in headers.values()]
    near = set.intersection(*small) if small else set()
    results = {}
    for rank, header in headers.items():
        parts = {name: Part(ref, name, header) for name, ref in refs[rank].items()}
        columns = {
            name: header.small[name] if name in near else StoredColumn.whole(part)
            for name, part in parts.items()
        }
        results[rank] = DataProto(columns, header.meta, header.small.bfloat16 & near)
    return results


def is_small(value: Any) -> bool:
    """Return True if a value should be sent inline with each call. Larger values are put into the
    object store once, which costs a millisecond.
    """
    if isinstance(value, (DataProto, np.ndarray)):
        return value.nbytes <= INLINE_BYTES
    return _weight(value, INLINE_BYTES) <= INLINE_BYTES


def _weight(value: Any, limit: int) -> int:
    """Return the approximate size of a plain value in bytes, or a number above `limit` if the size
    is unknown."""
    if isinstance(value, (str, bytes)):
        return len(value) + 1
    if value is None or isinstance(value, (bool, int, float, Path)):
        return 64
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    items = (
        [*value, *value.values()]
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else None
    )
    if items is None or 8 * len(items) > limit:
        return limit + 1
    total = 64
    for item in items:
        total += _weight(item, limit - total)
        if total > limit:
            break
    return total
