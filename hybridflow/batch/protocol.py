"""`DataProto`: the immutable batch of named columns that is passed between driver, workers and
disk.

A column is a dense array `[B, ...]`, a `Jagged` (rows of different lengths) or an object array
`[B]` (strings, dicts). Columns are stored as numpy arrays, which move through Ray's object store 20
times faster than torch tensors. Torch views are created on demand, and `hybridflow.batch.arrow`
reads and writes files and streams. numpy has no bfloat16, so a bfloat16 column is stored as uint16
and tagged.

A column may also be `Deferred`: its rows stay in the object store until they are read. A batch with
deferred columns is sliced, reordered and sent like any other.

Every operation returns a new batch, which may share memory with its inputs. Arrays are read-only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridflow.batch.columns import (
    Deferred,
    Held,
    as_tensor,
    checked_column,
    checked_meta,
    concat_column,
    human_bytes,
    merged_meta,
    named_lengths,
    row_type,
    same_column,
    same_row_type,
    same_value,
    shape_text,
    shown,
    slice_column,
    take_column,
    to_numpy,
)
from hybridflow.batch.jagged import Jagged, describe
from hybridflow.errors import SchemaError

if TYPE_CHECKING:
    import torch

RowIndex: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | np.ndarray


class DataProto:
    """A batch of B rows in named columns, plus JSON-serializable values that apply to all rows
    (`meta`).

    Construct it with `from_columns`. All errors are `SchemaError` and name the column.
    """

    __slots__ = ("_bfloat16", "_columns", "_length", "_meta")
    _columns: Mapping[str, Held]
    _meta: Mapping[str, Any]
    _bfloat16: frozenset[str]
    _length: int

    def __init__(
        self, columns: Mapping[str, Held], meta: Mapping[str, Any], bfloat16: Iterable[str] = ()
    ) -> None:
        checked = {name: checked_column(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in checked.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError(
                "columns of one batch must have the same number of rows, got "
                + named_lengths(lengths)
            )
        tags = frozenset(bfloat16)
        for name in tags:
            if getattr(checked.get(name), "dtype", None) != np.uint16:
                raise SchemaError(
                    f"column {name!r} is tagged bfloat16 but is missing or not uint16"
                )
        object.__setattr__(self, "_columns", MappingProxyType(checked))
        object.__setattr__(self, "_meta", MappingProxyType(checked_meta(meta)))
        object.__setattr__(self, "_bfloat16", tags)
        object.__setattr__(self, "_length", next(iter(lengths.values()), 0))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"DataProto is immutable, so {name!r} cannot be set; with_columns() and with_meta() "
            "return a modified copy"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        whole = self.fetch()
        columns = {}
        for n, c in whole._columns.items():
            columns[n] = np.ascontiguousarray(c) if isinstance(c, np.ndarray) else c
        return DataProto, (columns, dict(self._meta), tuple(whole._bfloat16))

    # ---- construction

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Held],
        meta: Mapping[str, Any] | None = None,
        *,
        bfloat16: Iterable[str] = (),
    ) -> DataProto:
        """Build a batch from dense `[B, ...]`, `Jagged` and object `[B]` columns.

        `bfloat16` names the uint16 columns that contain bfloat16 bits. Arrays are not copied,
        except that numpy string arrays are converted to object arrays.
        """
        return cls(columns, meta or {}, bfloat16)

    def with_columns(self, **columns: Held) -> DataProto:
        """Return a batch with columns added or replaced. A replaced column loses its bfloat16
        tag."""
        wrong = {}
        for name, column in columns.items():
            if len(checked_column(name, column)) != len(self):
                wrong[name] = len(column)
        if wrong and set(self._columns) - set(columns):
            raise SchemaError(
                f"new columns must have {len(self)} rows, like the batch, got "
                f"{named_lengths(wrong)}"
            )
        return DataProto({**self._columns, **columns}, self._meta, self._bfloat16 - set(columns))

    def with_torch(self, **tensors: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> DataProto:
        """Return a batch with columns added from tensors `[B, ...]` or pairs (values `[sum(t),
        ...]`, offsets `[B + 1]`).

        Otherwise equivalent to `with_columns`; bfloat16 tensors are tagged.
        """
        columns: dict[str, Held] = {}
        tags = set()
        for name, tensor in tensors.items():
            values, is_bfloat16 = to_numpy(name, tensor[0] if isinstance(tensor, tuple) else tensor)
            columns[name] = (
                Jagged(values, to_numpy(name, tensor[1])[0])
                if isinstance(tensor, tuple)
                else values
            )
            tags |= {name} if is_bfloat16 else set()
        added = self.with_columns(**columns)
        return DataProto(added._columns, added._meta, added._bfloat16 | tags)

    def with_meta(self, **values: Any) -> DataProto:
        """Return a batch with meta values added or replaced."""
        return DataProto(self._columns, {**self._meta, **values}, self._bfloat16)

    # ---- accessors

    def __len__(self) -> int:
        return self._length

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(self._columns)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Values that apply to all rows (read-only mapping)."""
        return self._meta

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the uint16 columns that contain bfloat16 bits."""
        return self._bfloat16

    @property
    def nbytes(self) -> int:
        """Total size of all columns in bytes, including deferred ones. Each object counts as one
        pointer."""
        return sum(column.nbytes for column in self._columns.values())

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return shown(self._held(name))

    def items(self) -> Iterable[tuple[str, Held]]:
        """Return (name, column) pairs. Deferred columns stay deferred."""
        return self._columns.items()

    @property
    def deferred(self) -> tuple[str, ...]:
        """Names of the columns that have not been fetched into this process."""
        names = []
        for name, column in self._columns.items():
            if isinstance(column, Deferred):
                names.append(name)
        return tuple(names)

    def fetch(self) -> DataProto:
        """Return the same batch with every deferred column fetched."""
        if not self.deferred:
            return self
        columns = dict(self._columns)
        tags = set(self._bfloat16)
        for name, column in self._columns.items():
            if isinstance(column, Deferred):
                columns[name], is_bfloat16 = column.fetch()
                if is_bfloat16:
                    tags.add(name)
        return DataProto(columns, self._meta, tags)

    def pieces(self, names: Iterable[str], nbytes: int = 4 << 20) -> Iterator[DataProto]:
        """Fetch the named columns and yield them in consecutive pieces of about `nbytes`.

        Iterating over the pieces never keeps an entire deferred column in memory. A batch without
        deferred columns is yielded as one piece.
        """
        part = self.select(names)
        far = part.deferred and part.nbytes
        for piece in part.split(max(1, len(part) * nbytes // far)) if far and len(part) else [part]:
            yield piece.fetch()

    def lengths(self, name: str) -> np.ndarray:
        """Return the row lengths `[B]` of the jagged column `name` without fetching it."""
        column = self._held(name)
        found = None if isinstance(column, np.ndarray) else column.lengths
        if found is None:
            raise SchemaError(f"column {name!r} is not jagged, so it has no row lengths")
        return found

    def dense(self, name: str) -> np.ndarray:
        """Return column `name` as a dense or object array. Raises SchemaError if it is jagged."""
        column = self[name]
        if isinstance(column, Jagged):
            raise SchemaError(f"column {name!r} must be dense here, but is jagged")
        return column

    def jagged(self, name: str) -> Jagged:
        """Return column `name` as `Jagged`. Raises SchemaError if it is not jagged."""
        column = self[name]
        if not isinstance(column, Jagged):
            raise SchemaError(f"column {name!r} must be jagged here, got a {describe(column)}")
        return column

    def torch(self, name: str) -> Any:
        """Return a column as torch view(s) without a copy: a tensor `[B, ...]`, or (values,
        offsets) for a jagged column.

        Clone a view before writing to it. A write would be visible to every batch that shares the
        memory, including the copy in Ray's object store.
        """
        near = self.select([name]).fetch()
        column = near[name]
        is_bfloat16 = name in near._bfloat16
        if isinstance(column, Jagged):
            return as_tensor(column.values, is_bfloat16), as_tensor(column.offsets)
        if column.dtype == object:
            raise SchemaError(
                f"column {name!r} contains Python objects and cannot be converted to a tensor"
            )
        return as_tensor(column, is_bfloat16)

    def equals(self, other: DataProto) -> bool:
        """Return True if both batches have equal columns (in any order), rows, types, tags and
        meta. NaN equals NaN."""
        return (
            set(self.columns) == set(other.columns)
            and same_value(dict(self._meta), dict(other._meta))
            and self._bfloat16 == other._bfloat16
            and all(
                same_column(column, other._columns[name]) for name, column in self._columns.items()
            )
        )

    def __repr__(self) -> str:
        width = max(map(len, self._columns), default=0)
        lines = [
            f"DataProto: {len(self)} rows, {len(self._columns)} columns, {human_bytes(self.nbytes)}"
        ]
        for name, column in self._columns.items():
            kind = (
                "bfloat16" if name in self._bfloat16 else str(getattr(column, "dtype", "deferred"))
            )
            lines.append(
                f"  {name:<{width}}  {kind} {shape_text(column)}  {human_bytes(column.nbytes)}"
            )
        if self._meta:
            lines.append(f"  meta: {dict(self._meta)}")
        return "\n".join(lines)

    # ---- columns

    def select(self, names: Iterable[str]) -> DataProto:
        """Return a batch with only the named columns, in the given order."""
        columns = {name: self._held(name) for name in names}
        return DataProto(columns, self._meta, self._bfloat16 & set(columns))

    def drop(self, names: Iterable[str]) -> DataProto:
        """Return a batch without the named columns."""
        dropped = self.select(names)
        return self.select(name for name in self._columns if name not in dropped)

    def rename(self, mapping: Mapping[str, str]) -> DataProto:
        """Rename columns from key to value. Raises SchemaError if a new name is already taken."""
        self.select(mapping)  # raises if a column is missing
        names = [mapping.get(name, name) for name in self._columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(
                f"rename would produce two columns named {', '.join(map(repr, twice))}"
            )
        tags = {mapping.get(name, name) for name in self._bfloat16}
        return DataProto(dict(zip(names, self._columns.values(), strict=True)), self._meta, tags)

    def union(self, other: DataProto) -> DataProto:
        """Merge the columns and meta of two batches. Names that occur in both must have equal
        values."""
        if self._columns and other._columns and len(self) != len(other):
            raise SchemaError(
                f"union: batches must have the same number of rows, got {len(self)} and "
                f"{len(other)}"
            )
        for name in self._columns:
            if name in other._columns and not (
                same_column(self._columns[name], other._columns[name])
                and (name in self._bfloat16) == (name in other._bfloat16)
            ):
                raise SchemaError(
                    f"union: column {name!r} is in both batches with different values; drop or "
                    "rename one"
                )
        meta = merged_meta("union", [self._meta, other._meta])
        return DataProto(
            {**other._columns, **self._columns}, meta, self._bfloat16 | other._bfloat16
        ).select(dict.fromkeys([*self._columns, *other._columns]))

    # ---- rows

    def rows(self, index: RowIndex) -> DataProto:
        """Select rows by int (one row), slice, list, boolean mask or index array. Consecutive rows
        are returned as views."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return (
                self._slice(start, stop) if step == 1 else self._take(np.arange(start, stop, step))
            )
        if isinstance(index, (int, np.integer)):
            index = [int(index)]
        array = np.asarray(index)
        if array.ndim != 1:
            raise SchemaError(f"a row index must be one-dimensional, got {describe(array)}")
        if array.dtype == bool:
            if len(array) != len(self):
                raise SchemaError(
                    f"a row mask must have {len(self)} values, one per row, got {len(array)}"
                )
            array = np.flatnonzero(array)
        return self._take(_positions(array, len(self)))

    def reorder(self, index: npt.ArrayLike) -> DataProto:
        """Permute the rows. `index` `[B]` must be a permutation of all rows."""
        order = np.asarray(index)
        if order.shape != (len(self),) or not np.array_equal(np.sort(order), np.arange(len(self))):
            raise SchemaError(
                f"reorder requires a permutation of all {len(self)} rows; use rows() to select or "
                "repeat rows"
            )
        return self.rows(order)

    def repeat(self, n: int) -> DataProto:
        """Repeat every row `n` times, interleaved: a a b b, so that the samples of one prompt are
        adjacent."""
        if n < 1:
            raise SchemaError(f"repeat requires n >= 1, got {n}")
        return self if n == 1 else self._take(np.repeat(np.arange(len(self)), n))

    def split(self, size: int) -> list[DataProto]:
        """Split into consecutive pieces of `size` rows; the last may be shorter. An empty batch
        yields no pieces."""
        if size < 1:
            raise SchemaError(f"split requires size >= 1, got {size}")
        parts: list[DataProto] = []
        for i in range(0, len(self), size):
            parts.append(self._slice(i, min(i + size, len(self))))
        return parts

    def chunk(self, plan: int | Sequence[npt.ArrayLike]) -> list[DataProto]:
        """Split into `plan` consecutive pieces whose sizes differ by at most one row.

        If `plan` is a list of index arrays, return one piece for each array.
        """
        if not isinstance(plan, int):
            return [self.rows(np.asarray(index)) for index in plan]
        if plan < 1:
            raise SchemaError(f"chunk requires at least one piece, got {plan}")
        small, extra = divmod(len(self), plan)
        chunks: list[DataProto] = []
        start = 0
        for i in range(plan):
            end = start + small + (i < extra)
            chunks.append(self._slice(start, end))
            start = end
        return chunks

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Concatenate all rows. Columns, types, trailing shapes, tags and shared meta values must
        agree."""
        if not parts:
            raise SchemaError("concat requires at least one batch")
        first = parts[0]
        for i, part in enumerate(parts[1:], 1):
            odd = set(part.columns) ^ set(first.columns) or part._bfloat16 ^ first._bfloat16
            if odd:
                raise SchemaError(
                    f"concat: part {i} and part 0 differ in column "
                    f"{', '.join(map(repr, sorted(odd)))}"
                )
            for name in first.columns:
                if not same_row_type(part._columns[name], first._columns[name]):
                    a = row_type(first._columns[name])
                    b = row_type(part._columns[name])
                    raise SchemaError(
                        f"concat: column {name!r} is {a} in part 0 and {b} in part {i}"
                    )
        meta = merged_meta("concat", [part._meta for part in parts])
        if len(parts) == 1:
            return first
        columns = {}
        for name in first.columns:
            columns[name] = concat_column([part._columns[name] for part in parts])
        return DataProto(columns, meta, first._bfloat16)

    def pad_to_divisor(self, n: int) -> tuple[DataProto, int]:
        """Pad to a length divisible by `n`, repeating rows cyclically from the start. Returns
        (batch, number of rows added)."""
        if n < 1:
            raise SchemaError(f"pad_to_divisor requires n >= 1, got {n}")
        padding = -len(self) % n
        if not padding:
            return self, 0
        return self._take(np.arange(len(self) + padding) % len(self)), padding

    def unpad(self, num_padding: int) -> DataProto:
        """Return the batch without its last `num_padding` rows."""
        if not 0 <= num_padding <= len(self):
            raise SchemaError(f"cannot remove {num_padding} padding rows from {len(self)} rows")
        return self._slice(0, len(self) - num_padding)

    # ---- internals

    def _slice(self, start: int, stop: int) -> DataProto:
        stop = max(start, stop)
        columns = {
            name: slice_column(column, start, stop) for name, column in self._columns.items()
        }
        return DataProto(columns, self._meta, self._bfloat16)

    def _take(self, index: np.ndarray) -> DataProto:
        if (
            len(index)
            and index[-1] - index[0] == len(index) - 1
            and bool((np.diff(index) == 1).all())
        ):
            return self._slice(int(index[0]), int(index[-1]) + 1)
        return DataProto(
            {name: take_column(column, index) for name, column in self._columns.items()},
            self._meta,
            self._bfloat16,
        )

    def _held(self, name: str) -> Held:
        if name not in self._columns:
            near = difflib.get_close_matches(str(name), self._columns, n=1)
            hint = f"; did you mean {near[0]!r}? The columns" if near else "; the columns"
            raise SchemaError(f"no column {name!r}{hint} are {', '.join(self._columns) or 'none'}")
        return self._columns[name]


def _positions(index: np.ndarray, rows: int) -> np.ndarray:
    """Resolve negative indices, which count from the end. Raises SchemaError for out-of-range
    indices."""
    if not len(index):
        return np.empty(0, dtype=np.int64)
    if index.dtype.kind not in "iu":
        raise SchemaError(f"a row index must be integer or boolean, got {describe(index)}")
    index = index.astype(np.int64)
    outside = index[(index < -rows) | (index >= rows)]
    if len(outside):
        raise SchemaError(f"row {outside[0]} is out of range for a batch of {rows} rows")
    return np.where(index < 0, index + rows, index)
