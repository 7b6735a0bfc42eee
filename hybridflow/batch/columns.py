"""Single columns of a batch: what is allowed, comparison, concatenation and how they print."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hybridflow.batch.blocks import Blocks, Picked
from hybridflow.batch.jagged import NUMERIC_KINDS, Jagged, describe, read_only
from hybridflow.errors import SchemaError

Column: TypeAlias = np.ndarray | Jagged


class Deferred(abc.ABC):
    """A column whose rows lie elsewhere, in an object store say. A batch can be cut, reordered and sent on without
    fetching them.

    Immutable. `single_controller` has the real one; this is all that a batch needs to know.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def take(self, index: np.ndarray) -> Deferred:
        """Rows at `index` `[K]` (non-negative, may repeat). Nothing is fetched."""

    @abc.abstractmethod
    def here(self) -> tuple[Column | Blocks | Picked, bool]:
        """The rows themselves, views where they can be, and whether they hold bfloat16 bits. They are not kept: each
        call fetches anew."""

    @classmethod
    def all_here(cls, columns: Mapping[str, Deferred]) -> dict[str, tuple[Column | Blocks | Picked, bool]]:
        """`here` of several columns, all of this class."""
        return {name: column.here() for name, column in columns.items()}

    @property
    @abc.abstractmethod
    def lengths(self) -> np.ndarray | None:
        """Row lengths `[B]` of a jagged column, known without fetching it; None for a dense one."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that lie elsewhere."""

    @abc.abstractmethod
    def concat(self, others: Sequence[Deferred]) -> Deferred:
        """The rows of this column and then of the others, which are of the same class."""

    def slice(self, start: int, stop: int) -> Deferred:
        """Rows `start..stop`."""
        return self.take(np.arange(start, max(start, stop)))


Held: TypeAlias = np.ndarray | Jagged | Blocks | Picked | Deferred  # what a batch holds; what it shows is a Column


def all_here(columns: Mapping[str, Deferred]) -> dict[str, tuple[Column | Blocks | Picked, bool]]:
    """`Deferred.here` of each, those of one class together."""
    found: dict[str, tuple[Column | Blocks | Picked, bool]] = {}
    kinds: dict[type[Deferred], dict[str, Deferred]] = {}
    for name, column in columns.items():
        kinds.setdefault(type(column), {})[name] = column
    for kind, alike in kinds.items():
        found |= kind.all_here(alike)
    return found


def shown(column: Held) -> Column:
    """The column itself, fetched where it lies elsewhere, and joined."""
    found = column.here()[0] if isinstance(column, Deferred) else column
    return found.join() if isinstance(found, (Blocks, Picked)) else found


def lengths_of(column: Held) -> np.ndarray | None:
    """Row lengths `[B]` of a jagged column, None for a dense one. Nothing is fetched or joined."""
    return None if isinstance(column, np.ndarray) else column.lengths


def slice_column(column: Held, start: int, stop: int) -> Held:
    """Rows `start..stop`, sharing memory."""
    return column[start:stop] if isinstance(column, np.ndarray) else column.slice(start, stop)


def take_column(column: Held, index: np.ndarray) -> Held:
    """Rows at `index` `[K]` (non-negative, may repeat). Large columns are copied when they are read, see
    `blocks.Picked`."""
    return Picked.of((column,), index) if isinstance(column, (np.ndarray, Jagged)) else column.take(index)


def checked_column(name: str, column: object) -> Held:
    """The column as it is stored (read-only), or SchemaError."""
    if isinstance(column, Blocks):
        return _checked_blocks(name, column)
    if isinstance(column, (Jagged, Deferred, Picked)):
        return column
    if not isinstance(column, np.ndarray):
        raise SchemaError(f"column {name!r} must be a numpy array or Jagged, not {describe(column)}")
    if column.dtype.kind == "U":
        column = column.astype(object)
    if column.ndim < 1 or (column.dtype == object and column.ndim != 1):
        raise SchemaError(f"column {name!r} must be dense [B, ...] or objects [B], not {describe(column)}")
    if column.dtype != object and column.dtype.kind not in NUMERIC_KINDS:
        raise SchemaError(f"column {name!r} has dtype {column.dtype}; bool, integers, floats and objects are supported")
    return read_only(column)


def _checked_blocks(name: str, column: Blocks) -> Blocks:
    first = column.blocks[0]
    if not all(same_row_type(first, block) for block in column.blocks[1:]):
        types = dict.fromkeys(map(row_type, column.blocks))
        raise SchemaError(f"column {name!r} has blocks of different types: {', '.join(types)}")
    return Blocks(tuple(read_only(block) if isinstance(block, np.ndarray) else block for block in column.blocks))


def checked_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta as it is stored, or SchemaError naming the key."""
    for key, value in meta.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"meta {key!r} is not JSON-able ({error}); per-row values belong in a column") from error
    return dict(meta)


def merged_meta(what: str, metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Meta of several batches; SchemaError when a shared key has different values."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and merged[key] != value:
                raise SchemaError(f"{what}: meta {key!r} is {merged[key]!r} in one part and {value!r} in another")
            merged[key] = value
    return merged


def row_type(column: Held) -> str:
    """Kind, dtype and trailing shape of one row: what must agree to concatenate."""
    if isinstance(column, Deferred):
        return "deferred"
    if isinstance(column, (Blocks, Picked)):
        return row_type(column.blocks[0] if isinstance(column, Blocks) else column.sample)
    values = column.values if isinstance(column, Jagged) else column
    return f"{'jagged' if isinstance(column, Jagged) else 'dense'} {values.dtype} {list(values.shape[1:])}"


def same_row_type(a: Held, b: Held) -> bool:
    """Whether `row_type` of both is the same; for arrays told without making the texts, which numpy takes 10 us for."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
    return row_type(a) == row_type(b)


def concat_column(parts: Sequence[Held]) -> Held:
    """All rows of columns of one row type. Deferred columns stay so, large ones are put side by side, others are copied
    together."""
    first = parts[0]
    if isinstance(first, Deferred):
        return first.concat([part for part in parts[1:] if isinstance(part, Deferred)])
    blocks: list[Column] = []
    for part in parts:
        assert not isinstance(part, Deferred), "row types have been compared"
        blocks += part.blocks if isinstance(part, Blocks) else [part.join() if isinstance(part, Picked) else part]
    return Blocks.beside(blocks)


def same_column(a: Held, b: Held) -> bool:
    """Equal rows and types; NaN equals NaN."""
    if a is b:
        return True
    a, b = shown(a), shown(b)
    if isinstance(a, Jagged) or isinstance(b, Jagged):
        return isinstance(a, Jagged) and isinstance(b, Jagged) and a.equals(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == object:
        return all(_same_object(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def _same_object(a: Any, b: Any) -> bool:
    """Equality that also works for objects holding arrays, where `==` alone is ambiguous."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and bool(np.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_object(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same_object(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124  NaN


def shape_text(column: Held) -> str:
    """Shape for people: jagged columns show the range of lengths."""
    if isinstance(column, Deferred):
        return f"[{len(column)}, ...] in the object store"
    if isinstance(column, Blocks):
        return " + ".join(shape_text(block) for block in column.blocks)
    like = column.sample if isinstance(column, Picked) else column
    if isinstance(like, np.ndarray):
        return str([len(column), *like.shape[1:]])
    lengths = lengths_of(column)
    assert lengths is not None, "a jagged column has lengths"
    span = f"{lengths.min()}..{lengths.max()} (mean {lengths.mean():.1f})" if len(lengths) else "0"
    return f"jagged [{', '.join([str(len(column)), span, *map(str, like.values.shape[1:])])}]"


def named_lengths(lengths: Mapping[str, int]) -> str:
    """`'a': 3, 'b': 4` for error messages."""
    return ", ".join(f"{name!r}: {n}" for name, n in lengths.items())


def human_bytes(n: int) -> str:
    """Bytes with a binary unit."""
    return f"{n} B" if n < 1024 else f"{n / 1024:.1f} KiB" if n < 1024**2 else f"{n / 1024**2:.1f} MiB"
