"""`Jagged`: rows of different lengths in two numpy arrays, without padding.

Row `i` is `values[offsets[i]:offsets[i + 1]]`. The same layout is used everywhere: Ray's object
store transfers the numpy buffers out-of-band, and torch, Arrow and Megatron's packed sequences
(`cu_seqlens`) use them without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridflow.errors import SchemaError

# mean length of rows up to which one gather of all values is faster than a copy of each row
_SHORT_ROW = 32


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return True for dtypes that both torch and Arrow support: bool, and integers and floats of up
    to 64 bits."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view of `array`. The flags of `array` itself do not change."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True, eq=False, slots=True)
class Jagged:
    """A column of B variable-length rows.

    Args:
        values: `[sum(t), ...]` numeric, all rows concatenated.
        offsets: `[B + 1]` int64, non-decreasing from 0 to `len(values)`.

    Raises:
        SchemaError: the offsets do not match the values, or the values are not numeric.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        values = self.values
        offsets = self.offsets
        if not isinstance(values, np.ndarray) or not is_numeric(values.dtype) or values.ndim < 1:
            raise SchemaError(
                f"jagged values must be a numeric array [sum(t), ...], got {describe(values)}"
            )
        if (
            not isinstance(offsets, np.ndarray)
            or offsets.dtype.kind not in "iu"
            or offsets.ndim != 1
            or not len(offsets)
        ):
            raise SchemaError(
                f"jagged offsets must be an int64 array [B + 1], got {describe(offsets)}"
            )
        offsets = offsets.astype(np.int64, copy=False)
        if offsets[0] != 0 or offsets[-1] != len(values):
            raise SchemaError(
                f"jagged offsets must run from 0 to {len(values)}, got {offsets[0]} to "
                f"{offsets[-1]}"
            )
        if len(offsets) > 1 and int(np.diff(offsets).min()) < 0:
            raise SchemaError(
                f"jagged offsets decrease at row {int(np.argmax(np.diff(offsets) < 0))}"
            )
        object.__setattr__(self, "values", read_only(values))
        object.__setattr__(self, "offsets", read_only(offsets))

    @classmethod
    def from_rows(cls, rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Jagged:
        """Build a column from a list of arrays or lists, each `[t_i, ...]`. If there are no rows,
        the values are one-dimensional.
        """
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        for i, array in enumerate(arrays):
            if array.ndim == 0 or array.shape[1:] != arrays[0].shape[1:]:
                raise SchemaError(
                    f"jagged row {i} has shape {list(array.shape)}; expected [t, "
                    f"{', '.join(map(str, arrays[0].shape[1:]))}]"
                )
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls.from_lengths(values, list(map(len, arrays)))

    @classmethod
    def from_lengths(cls, values: npt.NDArray[Any], lengths: npt.ArrayLike) -> Jagged:
        """Build a column from `[sum(t), ...]` values and `[B]` row lengths."""
        counts = np.asarray(lengths, dtype=np.int64)
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(values, offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Row lengths `[B]`."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Total size of values and offsets in bytes."""
        return self.values.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return map(self.row, range(len(self)))

    def __repr__(self) -> str:
        return f"Jagged({len(self)} rows, {len(self.values)} values, {self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Contiguous arrays are pickled as out-of-band buffers of exactly the view's bytes, strided
        # ones are copied in-band.
        return Jagged, (np.ascontiguousarray(self.values), np.ascontiguousarray(self.offsets))

    def row(self, i: int) -> npt.NDArray[Any]:
        """Return row `i` `[t_i, ...]` as a view. Negative `i` counts from the end. Raises
        IndexError if it is out of range.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} is out of range for {len(self)} rows")
        i %= len(self)
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def slice(self, start: int, stop: int) -> Jagged:
        """Return rows `start..stop`. The values are a view; the offsets are copied because they
        must start at 0."""
        stop = max(stop, start)
        first = self.offsets[start]
        last = self.offsets[stop]
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def take(self, index: npt.NDArray[np.int64]) -> Jagged:
        """Return a copy of the rows at `index` `[K]` (non-negative, may repeat)."""
        if not len(index):
            return self.slice(0, 0)
        starts = self.offsets[index]
        ends = self.offsets[index + 1]
        lengths = ends - starts
        total = int(lengths.sum())
        if total <= _SHORT_ROW * len(index):
            first = np.cumsum(lengths) - lengths  # of each row in the result
            values = self.values[np.repeat(starts - first, lengths) + np.arange(total)]
            return Jagged.from_lengths(values, lengths)
        pieces = []
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True):
            pieces.append(self.values[a:b])
        return Jagged.from_lengths(np.concatenate(pieces), lengths)

    def equals(self, other: Jagged) -> bool:
        """Return True if two columns have equal rows and dtypes. NaN equals NaN."""
        return (
            self.dtype == other.dtype
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.values, other.values, equal_nan=self.dtype.kind == "f")
        )

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """Concatenate the rows of `parts` (at least one; same dtype and trailing shape)."""
        if len(parts) == 1:
            return parts[0]
        values = []
        lengths = []
        for part in parts:
            values.append(part.values)
            lengths.append(part.lengths)
        return Jagged.from_lengths(np.concatenate(values), np.concatenate(lengths))


def describe(value: object) -> str:
    """Return the type and shape of any value, for error messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    return type(value).__name__
