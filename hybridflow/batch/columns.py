"""Operations on single columns of a batch: validation, equality, concatenation, formatting, and
conversion to torch tensors without a copy."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridflow.batch.jagged import Jagged, describe, is_numeric, read_only
from hybridflow.errors import SchemaError

if TYPE_CHECKING:
    import torch

Column: TypeAlias = np.ndarray | Jagged


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return an object column `[B]` with these values.

    Items are assigned one by one, because numpy would turn lists of equal length into a matrix.
    """
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


class Deferred(abc.ABC):
    """An immutable column whose rows are stored elsewhere, for example in an object store.

    A batch with such a column can be sliced, reordered and sent without fetching it. The
    implementation is in `single_controller`.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def take(self, index: np.ndarray) -> Deferred:
        """Select the rows at `index` `[K]` (non-negative, may repeat) without fetching them."""

    @abc.abstractmethod
    def fetch(self) -> tuple[Column, bool]:
        """Fetch the rows, as views if possible. Returns (column, True if it contains bfloat16
        bits).

        The result is not cached.
        """

    @property
    @abc.abstractmethod
    def lengths(self) -> np.ndarray | None:
        """Row lengths `[B]` of a jagged column, available without fetching it; None for a dense
        column."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Size of the rows in bytes, regardless of where they are stored."""

    @abc.abstractmethod
    def concat(self, others: Sequence[Deferred]) -> Deferred:
        """Return a column with the rows of `others` appended. All must be of this class."""

    def slice(self, start: int, stop: int) -> Deferred:
        """Return rows `start..stop`."""
        return self.take(np.arange(start, stop))


# the storage type inside a batch; its users get a Column
Held: TypeAlias = Column | Deferred


def shown(column: Held) -> Column:
    """Return the column, fetching it if it is deferred."""
    return column.fetch()[0] if isinstance(column, Deferred) else column


def slice_column(column: Held, start: int, stop: int) -> Held:
    """Return rows `start..stop`, sharing the column's memory."""
    return column[start:stop] if isinstance(column, np.ndarray) else column.slice(start, stop)


def take_column(column: Held, index: np.ndarray) -> Held:
    """Return the rows at `index` `[K]` (non-negative, may repeat). They are copied unless the
    column is deferred."""
    return column[index] if isinstance(column, np.ndarray) else column.take(index)


def checked_column(name: str, column: object) -> Held:
    """Validate a column and return it read-only, as a batch stores it. Raises SchemaError."""
    if isinstance(column, (Jagged, Deferred)):
        return column
    if not isinstance(column, np.ndarray):
        raise SchemaError(
            f"column {name!r} must be a numpy array or Jagged, got {describe(column)}"
        )
    if column.dtype.kind == "U":
        column = column.astype(object)
    if column.ndim < 1 or (column.dtype == object and column.ndim != 1):
        raise SchemaError(
            f"column {name!r} must be dense [B, ...] or objects [B], got {describe(column)}"
        )
    if column.dtype != object and not is_numeric(column.dtype):
        raise SchemaError(
            f"column {name!r} has unsupported dtype {column.dtype}; use bool, integers, floats of "
            "up to 64 bits, or objects"
        )
    return read_only(column)


def checked_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the meta and return a copy. Raises SchemaError naming the key."""
    for key, value in meta.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"meta {key!r} is not JSON-serializable ({error}); per-row values belong in a "
                "column"
            ) from error
    return dict(meta)


def merged_meta(what: str, metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta of several batches. Raises SchemaError if a shared key has different
    values."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and not same_value(merged[key], value):
                raise SchemaError(
                    f"{what}: meta {key!r} is {merged[key]!r} in one part and {value!r} in another"
                )
            merged[key] = value
    return merged


def row_type(column: Held) -> str:
    """Describe the kind, dtype and trailing shape of a column's rows. Only columns with equal
    descriptions can be concatenated."""
    if isinstance(column, Deferred):
        return "deferred"
    values = column.values if isinstance(column, Jagged) else column
    return (
        f"{'jagged' if isinstance(column, Jagged) else 'dense'} {values.dtype} "
        f"{list(values.shape[1:])}"
    )


def same_row_type(a: Held, b: Held) -> bool:
    """Return True if both columns have the same `row_type`.

    For arrays this avoids formatting the dtype, which takes 10 us in numpy.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
    return row_type(a) == row_type(b)


def concat_column(parts: Sequence[Held]) -> Held:
    """Concatenate columns of the same row type, copying the data once. Deferred columns stay
    deferred."""
    first = parts[0]
    if isinstance(first, Deferred):
        return first.concat([part for part in parts[1:] if isinstance(part, Deferred)])
    filled = list(filter(len, parts)) or [first]
    if len(filled) == 1:
        return filled[0]
    if isinstance(first, Jagged):
        return Jagged.concat([part for part in filled if isinstance(part, Jagged)])
    return np.concatenate([part for part in filled if isinstance(part, np.ndarray)])


def same_column(a: Held, b: Held) -> bool:
    """Return True if two columns have equal rows and types. NaN equals NaN."""
    if a is b:
        return True
    a = shown(a)
    b = shown(b)
    if isinstance(a, Jagged) or isinstance(b, Jagged):
        return isinstance(a, Jagged) and isinstance(b, Jagged) and a.equals(b)
    return _same_array(a, b)


def same_value(a: Any, b: Any) -> bool:
    """Return True if two objects of a column, or two meta values, are equal. Types must match at
    every level; NaN equals NaN.

    Raises:
        SchemaError: `==` fails for the values' type.
    """
    if a is b:
        return True
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _same_array(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    return _same_object(a, b)


def _same_object(a: Any, b: Any) -> bool:
    # compare a tensor's layout first: torch would broadcast, convert or raise
    layout = ("shape", "dtype", "device")
    if any(getattr(a, name, None) != getattr(b, name, None) for name in layout):
        return False
    try:
        equal = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124  NaN differs from itself
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception as error:
        raise SchemaError(
            f"could not compare two values of type {type(a).__qualname__}: {error}"
        ) from error


def _same_array(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == object:
        return all(map(same_value, a.flat, b.flat))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def shape_text(column: Held) -> str:
    """Format a column's shape for display. A jagged column shows the range of its row lengths."""
    if isinstance(column, Deferred):
        return f"[{len(column)}, ...] in the object store"
    if isinstance(column, np.ndarray):
        return str(list(column.shape))
    lengths = column.lengths
    span = f"{lengths.min()}..{lengths.max()} (mean {lengths.mean():.1f})" if len(lengths) else "0"
    return f"jagged [{', '.join([str(len(column)), span, *map(str, column.values.shape[1:])])}]"


def named_lengths(lengths: Mapping[str, int]) -> str:
    """Format lengths as `'a': 3, 'b': 4` for error messages."""
    return ", ".join(f"{name!r}: {n}" for name, n in lengths.items())


def human_bytes(n: int) -> str:
    """Format a byte count with a binary unit."""
    if n < 1024:
        return f"{n} B"
    return f"{n / 1024:.1f} KiB" if n < 1024**2 else f"{n / 1024**2:.1f} MiB"


class _Writable:
    """A wrapper that exposes an array's memory to numpy without the read-only flag, and keeps the
    owner alive.

    `torch.from_numpy` emits a UserWarning for a read-only array (torch has no read-only tensors),
    and silencing it with `warnings.catch_warnings` would not be thread-safe.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def as_tensor(array: npt.NDArray[Any], bfloat16: bool = False) -> torch.Tensor:
    """Return a tensor that shares the memory of `array` (any shape). With `bfloat16`, uint16 is
    viewed as bfloat16.

    An array with negative strides or non-native byte order is copied.
    """
    import torch  # here, because most users of batches need no tensors

    if not array.dtype.isnative or min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    tensor = torch.from_numpy(np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_numpy(name: str, tensor: torch.Tensor) -> tuple[npt.NDArray[Any], bool]:
    """Return an array that shares a CPU tensor's memory, and True if it contains bfloat16 bits
    (stored as uint16).

    Tensors on other devices are copied. For dtypes that numpy does not support, such as fp8, raises
    a SchemaError that names the column `name`.
    """
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy(), True
    try:
        return tensor.numpy(), False
    except TypeError as error:
        raise SchemaError(
            f"column {name!r} has dtype {tensor.dtype}, which numpy does not support; convert it, "
            "or store its bytes as uint8"
        ) from error
