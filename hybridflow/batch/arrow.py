"""`DataProto` as an Arrow table and on disk as parquet: readable by any tool, and safe to load (no pickle).

Jagged columns are lists, dense columns with inner dimensions fixed-size lists, objects strings (or JSON where they are
not all strings; tuples come back as lists). Field metadata says how a column was held, so a round trip gives the same
batch; a table written by somebody else is read by its Arrow types.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.batch.columns import Column
from hybridflow.batch.jagged import Jagged, describe
from hybridflow.errors import DataError, SchemaError

_KEY = b"hybridflow"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of an IPC stream; the reader does not ask for it
_SUM = b"HFcrc32\x00"  # then 4 bytes, little-endian: behind the end mark, where readers of Arrow streams do not look


Parts: TypeAlias = tuple[
    Mapping[str, Column], Mapping[str, Any], Iterable[str]
]  # columns, meta, names of bfloat16 columns


def to_table(columns: Mapping[str, Column], meta: Mapping[str, Any], bfloat16: Iterable[str]) -> pa.Table:
    """Arrow table of the parts of a batch; SchemaError names a column that has no Arrow form."""
    arrays, fields, tags = [], [], set(bfloat16)
    for name, column in columns.items():
        array, note = _array(name, column)
        if name in tags:
            note = {"bfloat16": True}
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata={_KEY: json.dumps(note).encode()} if note else None))
    metadata = {_KEY: json.dumps({"meta": dict(meta)}).encode()}
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def from_table(table: pa.Table) -> Parts:
    """Parts of the batch in an Arrow table; SchemaError names a column with nulls or a type that has no form here."""
    columns: dict[str, Column] = {}
    tags = []
    for field, chunked in zip(table.schema, table.columns, strict=True):
        note = _note(field.metadata)
        array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
        columns[field.name] = _column(field.name, array, note)
        tags += [field.name] if note.get("bfloat16") else []
    return columns, _note(table.schema.metadata).get("meta", {}), tags


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file. DataError names the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary)
        os.replace(temporary, path)
    except (OSError, pa.ArrowException) as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error}") from error


def read_parquet(path: Path) -> Parts:
    """Read one file; DataError names the file, and the column where one is at fault."""
    try:
        return from_table(pq.read_table(path, partitioning=None))
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error
    except (
        OSError,
        pa.ArrowException,
        ValueError,
    ) as error:  # damaged: a footer is ArrowInvalid, a page OSError, a name ValueError
        raise DataError(f"cannot read {path} as parquet: {error}") from error


def to_stream(table: pa.Table) -> bytes:
    """The table as one Arrow IPC stream, for sockets and pipes, and a checksum behind it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data + _SUM + zlib.crc32(data).to_bytes(4, "little")


def from_stream(data: bytes | memoryview) -> Parts:
    """Parts of the batch in an Arrow IPC stream; DataError when it is cut off, damaged, or no such stream. Others' lack
    our checksum."""
    stream = _checked_sum(memoryview(data))
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            table = reader.read_all()
        table.validate(full=True)  # offsets of a damaged stream may point anywhere
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DataError(f"{len(data)} bytes are no whole Arrow stream: {error}") from error
    if bytes(stream[-len(_END) :]) != _END:
        raise DataError(f"an Arrow stream of {len(data)} bytes lacks its end mark: it was cut off after a whole batch")
    return from_table(table)


def _checked_sum(data: memoryview) -> memoryview:
    """The stream without its checksum, which must be right where there is one."""
    stream, mark, found = data[: -len(_SUM) - 4], data[-len(_SUM) - 4 : -4], data[-4:]
    if bytes(mark) != _SUM:
        return data
    expected, actual = int.from_bytes(found, "little"), zlib.crc32(stream)
    if actual != expected:
        raise DataError(
            f"an Arrow stream of {len(data)} bytes is damaged: its checksum is {actual:08x}, the sender's was "
            f"{expected:08x}"
        )
    return stream


def _array(name: str, column: Column) -> tuple[pa.Array, dict[str, Any]]:
    if not isinstance(column, Jagged) and column.dtype == object:
        return _object_array(name, column)
    return _numeric_array(name, column), {}


def _numeric_array(name: str, column: Column) -> pa.Array:
    values = column.values if isinstance(column, Jagged) else column
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        if size == 0:
            raise SchemaError(f"column {name!r}: an inner dimension of size 0 has no Arrow form ({describe(values)})")
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return pa.LargeListArray.from_arrays(pa.array(column.offsets), array) if isinstance(column, Jagged) else array


def _object_array(name: str, column: np.ndarray) -> tuple[pa.Array, dict[str, Any]]:
    if all(value is None or isinstance(value, str) for value in column):
        return pa.array(column.tolist(), pa.large_string()), {}
    texts = []
    for i, value in enumerate(column):
        try:
            texts.append(json.dumps(value, default=_plain))
        except (TypeError, ValueError) as error:
            raise SchemaError(f"column {name!r} row {i} cannot be written as JSON: {error}") from error
    return pa.array(texts, pa.large_string()), {"json": True}


def _plain(value: object) -> Any:
    """JSON form of numpy scalars and arrays inside objects."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON-able")


def _note(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_KEY, b"{}")
    try:
        note = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"damaged hybridflow metadata {text[:80]!r}") from error
    return note if isinstance(note, dict) else {}


def _column(name: str, array: pa.Array, note: Mapping[str, Any]) -> Column:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if _is_number(_leaf(kind.value_type)):
            _refuse_nulls(name, array)
            offsets = array.offsets.to_numpy().astype(np.int64)
            return Jagged(_dense(name, array.flatten()), offsets - offsets[0])
    elif _is_number(_leaf(kind)):
        return _dense(name, array)
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_nested(kind) or pa.types.is_null(kind)
    ):
        raise SchemaError(f"column {name!r} has the Arrow type {kind}, which has no form in a batch")
    values = array.to_pylist()
    if note.get("json"):
        try:
            values = [json.loads(text) for text in values]
        except (TypeError, ValueError) as error:
            raise SchemaError(f"column {name!r} should hold JSON: {error}") from error
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # a slice assignment would read lists of one length as a matrix
        column[i] = value
    return column


def _dense(name: str, array: pa.Array) -> np.ndarray:
    _refuse_nulls(name, array)
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
        _refuse_nulls(name, array)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _leaf(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise SchemaError(f"column {name!r} has {array.null_count} missing values; fill them in or drop the rows")
