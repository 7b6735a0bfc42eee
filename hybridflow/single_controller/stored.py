"""Columns that stay in Ray's object store: the driver holds references to them and passes those on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.batch.blocks import Blocks, Picked
from hybridflow.batch.columns import Column, Deferred
from hybridflow.errors import DataError, HybridFlowError
from hybridflow.single_controller.pieces import ColumnRecipe, Header, Recipe, assemble

INLINE_BYTES = 64 << 10  # a result column up to this size is brought to the driver at once


@dataclass(eq=False)
class Origin:
    """The call that makes some parts. Until it is done, `wait` waits for it; afterwards nothing here holds on to the
    call."""

    wait: Callable[[], Any] | None
    headers: dict[int, Header] = field(default_factory=dict)
    error: HybridFlowError | None = None

    def header(self, rank: int) -> Header:
        """What `rank` returned; waits when it is not known, and raises what went wrong in the call."""
        if rank not in self.headers:
            self.check()
        return self.headers[rank]

    def check(self) -> None:
        """Wait for the call; raises what went wrong in it."""
        if self.wait is not None:
            self.wait()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's share of a column: an object with a batch that has that column."""

    ref: Any
    rows: int
    name: str  # of the column inside the object
    rank: int
    origin: Origin

    @property
    def header(self) -> Header:
        """See `Origin.header`."""
        return self.origin.header(self.rank)


@dataclass(frozen=True, eq=False)
class StoredColumn(Deferred):
    """Rows `index` `[B]` of `parts` laid end to end."""

    parts: tuple[Part, ...]
    index: np.ndarray

    @classmethod
    def whole(cls, part: Part) -> StoredColumn:
        """All rows of one part."""
        return cls((part,), np.arange(part.rows))

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray) -> StoredColumn:
        """See Deferred."""
        return StoredColumn(self.parts, self.index[index])

    def concat(self, others: Sequence[Deferred]) -> StoredColumn:
        """See Deferred."""
        columns = [self, *(other for other in others if isinstance(other, StoredColumn))]
        starts = np.cumsum([0, *(sum(part.rows for part in column.parts) for column in columns)])
        index = np.concatenate([column.index + start for column, start in zip(columns, starts, strict=False)])
        return StoredColumn(tuple(part for column in columns for part in column.parts), index)

    def needed(self) -> StoredColumn:
        """Without the parts that none of the rows lies in."""
        starts = np.cumsum([0, *(part.rows for part in self.parts)])
        part_of = np.searchsorted(starts, self.index, side="right") - 1
        used = np.unique(part_of) if len(self.index) else np.zeros(1, np.int64)
        moved = np.zeros(len(self.parts), np.int64)
        moved[used] = np.cumsum([0, *(self.parts[at].rows for at in used[:-1])]) - starts[used]
        return StoredColumn(tuple(self.parts[at] for at in used), self.index + moved[part_of])

    def here(self) -> tuple[Column | Blocks | Picked, bool]:
        """See Deferred. Views of the store where few runs of rows are wanted, else one gathered copy.

        Raises:
            DataError: an object is lost, because the node that held it is.
            HybridFlowError: the call that makes the column failed.
        """
        import ray

        column = self.needed()
        column.require_made()
        try:
            objects = ray.get([part.ref for part in column.parts])
        except ray.exceptions.RayError as error:
            raise DataError(
                f"column {column.parts[0].name!r} is lost: {str(error).strip().splitlines()[-1]}"
            ) from error
        return column.made_of(objects)

    @classmethod
    def all_here(cls, columns: Mapping[str, Deferred]) -> dict[str, tuple[Column | Blocks | Picked, bool]]:
        """See Deferred. One request for all objects, which takes about as long as one for those of a single column."""
        import ray

        needed = {name: column.needed() for name, column in columns.items() if isinstance(column, StoredColumn)}
        for column in needed.values():
            column.require_made()
        refs = list(dict.fromkeys(part.ref for column in needed.values() for part in column.parts))
        try:
            objects = dict(zip(refs, ray.get(refs), strict=True))
        except ray.exceptions.RayError:
            return super().all_here(columns)  # says which column is lost
        return {name: column.made_of([objects[part.ref] for part in column.parts]) for name, column in needed.items()}

    def require_made(self) -> None:
        """Raise what went wrong in the calls that make the column."""
        for part in self.parts:
            _ = part.header

    def made_of(self, objects: Sequence[DataProto]) -> tuple[Column | Blocks | Picked, bool]:
        """What `here` gives, once the object of each part is there."""
        batch = assemble([held.select([part.name]) for part, held in zip(self.parts, objects, strict=True)], self.index)
        [(name, found)] = batch.items()
        assert not isinstance(found, Deferred)
        return found, name in batch.bfloat16

    @property
    def lengths(self) -> np.ndarray | None:
        """See Deferred."""
        found = [part.header.lengths.get(part.name) for part in self.parts]
        known = [lengths for lengths in found if lengths is not None]
        return np.concatenate(known)[self.index] if len(known) == len(found) else None

    @property
    def nbytes(self) -> int:
        """See Deferred."""
        rows = sum(part.rows for part in self.parts)
        total = sum(part.header.nbytes[part.name] for part in self.parts)
        return total * len(self.index) // max(rows, 1)


@dataclass
class Outgoing:
    """Arguments of one call on their way: batches with stored columns become recipes, and the objects they need are
    sent along."""

    objects: list[Any] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    _at: dict[Any, int] = field(default_factory=dict)

    def recipe(self, batch: DataProto, store: Callable[[Any], Any]) -> Recipe:
        """How the receiver builds `batch`; `store` puts its local columns into the object store."""
        columns = []
        for name in batch.deferred:
            held = dict(batch.items())[name]
            if not isinstance(held, StoredColumn):
                raise HybridFlowError(f"column {name!r} is a {type(held).__name__}, which cannot be sent")
            column = held.needed()
            columns.append(
                ColumnRecipe(name, tuple((self._add(part), part.name) for part in column.parts), column.index)
            )
        local = batch.drop(batch.deferred)
        position = self.add(store(local)) if local.nbytes > INLINE_BYTES else None
        return Recipe(local if position is None else position, tuple(columns), batch.columns)

    def _add(self, part: Part) -> int:
        if part.origin not in self.origins:
            self.origins.append(part.origin)
        return self.add(part.ref)

    def add(self, ref: Any) -> int:
        """The position of this object among those sent along."""
        if ref not in self._at:
            self._at[ref] = len(self.objects)
            self.objects.append(ref)
        return self._at[ref]


def is_small(value: Any) -> bool:
    """Whether a value travels inside each call rather than once through the store, which costs a millisecond."""
    if isinstance(value, (DataProto, np.ndarray)):
        return value.nbytes <= INLINE_BYTES
    return _weight(value, INLINE_BYTES) <= INLINE_BYTES


def _weight(value: Any, limit: int) -> int:
    """Bytes of a plain value, about; more than `limit` for what cannot be told."""
    if isinstance(value, (str, bytes)):
        return len(value) + 1
    if value is None or isinstance(value, (bool, int, float, Path)):
        return 64
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    items = (
        [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
    )
    if items is None or 8 * len(items) > limit:
        return limit + 1
    total = 64
    for item in items:
        total += _weight(item, limit - total)
        if total > limit:
            break
    return total


def stored_batch(
    columns: Mapping[str, Any], rows: int, meta: Mapping[str, Any], rank: int, origin: Origin
) -> DataProto:
    """One rank's result as columns that stay where they are: `columns` has the object that holds each."""
    return DataProto(
        {name: StoredColumn.whole(Part(ref, rows, name, rank, origin)) for name, ref in columns.items()}, meta
    )


def with_small_columns(batch: DataProto) -> DataProto:
    """The small columns, which all ranks sent with their headers, in place of references to them. For the whole result
    of a call."""
    near, tags = {}, set(batch.bfloat16)
    for name, column in batch.items():
        headers = [part.header for part in column.parts] if isinstance(column, StoredColumn) else []
        if headers and all(name in header.small for header in headers):
            found = DataProto.concat([header.small.select([name]) for header in headers]).rows(slice(0, len(batch)))
            near[name], tags = found[name], tags | found.bfloat16
    return DataProto({**dict(batch.items()), **near}, batch.meta, tags) if near else batch
