"""Columns that stay in Ray's object store: the messages that describe them, and the columns of
which the driver handles only references.

A rank that returns a batch sends a `Header` and puts the columns into one or more objects. A rank
that receives such columns gets a `Recipe`, which lists the objects, the column to read from each,
and the order of the rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Column, DataProto, Deferred, Jagged
from hybridflow.errors import DataError, HybridFlowError

_PLAIN = {str, int, float, bool, type(None)}  # arguments that JSON keeps as they are
INLINE_BYTES = 64 << 10  # result columns up to this size are sent to the driver immediately


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
        sizes = {}
        lengths = {}
        for name, column in batch.items():
            sizes[name] = column.nbytes
            if isinstance(column, Jagged):
                lengths[name] = column.lengths
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
    """A call to one rank. It is a single value because Ray serializes each argument separately.

    Args:
        values: arguments; `At` and `Recipe` refer to objects sent along.
        keywords: names of the last arguments.
        together: groups of result columns that stay in the object store (`Host.call_stored`).
        inline_bytes: result columns up to this size are sent to the driver immediately.
    """

    method: str
    values: tuple[Any, ...]
    keywords: tuple[str, ...]
    together: tuple[tuple[str, ...], ...] = ()
    inline_bytes: int = 0

    def arguments(self, objects: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments."""
        built = [_built(value, objects) for value in self.values]
        positional = len(built) - len(self.keywords)
        return built[:positional], dict(zip(self.keywords, built[positional:], strict=True))

    def packed(self) -> Request | bytes:
        """Return the request as JSON if all its arguments are numbers, texts or objects sent along.
        Ray sends bytes as they are, but pickles a request, which takes a third of a call's time.
        """
        if not all(type(value) in _PLAIN or isinstance(value, At) for value in self.values):
            return self
        # the position of an object is a list, which no argument is
        values = [[value.position] if isinstance(value, At) else value for value in self.values]
        fields = [self.method, values, self.keywords, self.together, self.inline_bytes]
        return json.dumps(fields).encode()

    @classmethod
    def unpacked(cls, sent: Request | bytes) -> Request:
        """Return the request that was `packed`."""
        if isinstance(sent, Request):
            return sent
        method, values, keywords, together, inline_bytes = json.loads(sent)
        return cls(
            method,
            tuple(At(value[0]) if isinstance(value, list) else value for value in values),
            tuple(keywords),
            tuple(map(tuple, together)),
            inline_bytes,
        )


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
            parts = []
            for at, name in column.sources:
                parts.append(objects[at].select([name]).rename({name: column.name}))
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
    taken = []
    for i, part in enumerate(parts):
        taken.append(part.rows(index[part_of == i] - starts[i]))
    return DataProto.concat(taken).reorder(np.argsort(np.argsort(part_of, kind="stable")))


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
        parts = list(self.parts)
        index = [self.index]
        start = self._rows.sum()
        for other in others:
            if isinstance(other, StoredColumn):
                parts += other.parts
                index.append(other.index + start)
                start += other._rows.sum()
        return StoredColumn(tuple(parts), np.concatenate(index))

    @property
    def _rows(self) -> np.ndarray:
        """Number of rows of each part."""
        return np.array([part.header.rows for part in self.parts], np.int64)

    def needed(self) -> StoredColumn:
        """Return the same rows, but drop the parts that contribute no rows."""
        rows = self._rows
        ends = np.cumsum(rows)
        part_of = np.searchsorted(ends, self.index, side="right")
        used = np.unique(part_of) if len(self.index) else np.zeros(1, np.int64)
        moved = np.zeros(len(self.parts), np.int64)
        moved[used] = np.cumsum(rows[used]) - ends[used]
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
        alike = []
        for part, held in zip(column.parts, objects, strict=True):
            alike.append(held.select([part.name]).rename({part.name: name}))
        found = gather(alike, column.index)
        return found[name], name in found.bfloat16

    @property
    def lengths(self) -> np.ndarray | None:
        """Row lengths `[B]` of a jagged column, taken from the headers; None for a dense column."""
        found = []
        for part in self.parts:
            if part.name not in part.header.lengths:
                return None
            found.append(part.header.lengths[part.name])
        return np.concatenate(found)[self.index]

    @property
    def nbytes(self) -> int:
        """Size of these rows in bytes; an estimate if they include only some rows of a part."""
        total = sum(part.header.nbytes[part.name] for part in self.parts)
        return total * len(self.index) // max(int(self._rows.sum()), 1)


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

    kept = {}
    for name, column in batch.items():
        if isinstance(column, Jagged) and column.nbytes > INLINE_BYTES:
            alone = DataProto({name: column}, {}, batch.bfloat16 & {name})
            kept[name] = StoredColumn.whole(Part(ray.put(alone), name, Header.of(alone)))
    return DataProto({**dict(batch.items()), **kept}, batch.meta, batch.bfloat16 - set(kept))


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
        columns: dict[str, Column | StoredColumn] = {}
        for name, ref in refs[rank].items():
            if name in near:
                columns[name] = header.small[name]
            else:
                columns[name] = StoredColumn.whole(Part(ref, name, header))
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
