"""Batches as Arrow tables, parquet files and IPC streams. Any Arrow tool can read them, and loading
is safe (no pickle).

Jagged columns become lists, dense columns with inner dimensions become fixed-size lists, and object
columns become strings. Objects other than strings are stored as JSON, with tags for tuples, integer
keys and arrays. Field metadata records the column kind, so a round trip returns the same batch.
Tables from other tools are read according to their Arrow types.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.batch.columns import Column, objects
from hybridflow.batch.jagged import Jagged, describe
from hybridflow.batch.protocol import DataProto
from hybridflow.errors import DataError, SchemaError, StorageError

_KEY = b"hybridflow"
_PARQUET_MARK = b"PAR1"  # the first bytes of every parquet file
# end marker of an IPC stream, which Arrow's own reader does not require
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Precedes the 4-byte checksum (little-endian). Both follow the end marker, at which stream readers
# stop.
_CHECKSUM_MARK = b"HFcrc32\x00"


def to_table(batch: DataProto) -> pa.Table:
    """Convert a batch to an Arrow table. The batch's meta is stored in the table's schema metadata.

    Raises:
        SchemaError: a column cannot be represented in Arrow; the message names it.
    """
    arrays = []
    fields = []
    for name in batch.columns:
        array, note = _array(name, batch[name])
        note = {"bfloat16": True} if name in batch.bfloat16 else note
        arrays.append(array)
        fields.append(
            pa.field(name, array.type, metadata={_KEY: json.dumps(note).encode()} if note else None)
        )
    metadata = {_KEY: json.dumps({"meta": _tagged(dict(batch.meta))}).encode()}
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def from_table(table: pa.Table) -> DataProto:
    """Convert an Arrow table from `to_table` or another tool to a batch. Lists become jagged
    columns.

    Raises:
        SchemaError: a column has missing values or an unsupported type; the message names it.
    """
    columns: dict[str, Column] = {}
    tags = []
    for field, chunked in zip(table.schema, table.columns, strict=True):
        note = _note(field.metadata)
        array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
        columns[field.name] = _column(field.name, array, note)
        tags += [field.name] if note.get("bfloat16") else []
    return DataProto(columns, _untagged(_note(table.schema.metadata).get("meta", {})), tags)


def write_parquet(path: str | Path, batches: DataProto | Iterable[DataProto]) -> None:
    """Write all `batches`, which must have the same columns, to one file. The write is atomic.

    Raises:
        StorageError: the disk is full or the file cannot be written.
        SchemaError: a column cannot be represented in Arrow.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer: pq.ParquetWriter | None = None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for table in map(to_table, [batches] if isinstance(batches, DataProto) else batches):
            with _naming(f"could not write {path}"):
                writer = writer or pq.ParquetWriter(
                    temporary, table.schema, compression="zstd", write_page_checksum=True
                )
                writer.write_table(table)
        if writer is None:
            raise DataError(f"{path}: there are no batches to write, so the columns are unknown")
        with _naming(f"could not write {path}"):
            writer.close()
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # the error is already being raised
            if writer is not None:
                writer.close()
            temporary.unlink(missing_ok=True)


def read_parquet(path: str | Path) -> DataProto:
    """Read all rows of one file. Raises the same errors as `iter_parquet`."""
    with _open_parquet(path) as file:
        return from_table(file.read())


def parquet_rows(path: str | Path) -> int:
    """Return a file's row count, read from its footer. Raises the same errors as `iter_parquet`."""
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


def iter_parquet(
    path: str | Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    rows: int = 4096,
    most_bytes: int | None = None,
) -> Iterator[DataProto]:
    """Yield the requested columns of one file in batches of at most `rows` rows.

    Args:
        path: the parquet file.
        required: columns that the file must have.
        optional: columns to read if present.
        rows: maximum rows per batch.
        most_bytes: maximum decompressed size of these columns per row group, in bytes; None for
            half of the machine's memory.

    Raises:
        DataError: the file is missing, not a complete parquet file, lacks a required column, or is
            larger than allowed; the message names the file.
        SchemaError: a column has missing values or an unsupported type. The message names the file
            and the column.
    """
    with _open_parquet(path) as file:
        present = file.schema_arrow.names
        if missing := [name for name in required if name not in present]:
            raise DataError(
                f"{path}: column {', '.join(map(repr, missing))} is missing; the file has "
                f"{', '.join(present) or 'no columns'}"
            )
        columns = [*required, *(name for name in optional if name in present)]
        _refuse_bomb(path, file, most_bytes, columns)
        for piece in file.iter_batches(rows, columns=columns):
            yield from_table(pa.Table.from_batches([piece]))


def pick_parquet(
    path: str | Path, numbers: Sequence[int], columns: Sequence[str], most_bytes: int
) -> DataProto:
    """Read the rows with the given indices, in the given order. Skips row groups that contain none
    of them, and columns missing from the file. For `most_bytes` and errors, see `iter_parquet`."""
    found: dict[int, pa.RecordBatch] = {}
    with _open_parquet(path) as file:
        names = [name for name in columns if name in file.schema_arrow.names]
        _refuse_bomb(path, file, most_bytes, names)
        first = 0
        for group in range(file.metadata.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            if any(first <= number < end for number in numbers):
                at = first
                for piece in file.iter_batches(64, row_groups=[group], columns=names):
                    for number in numbers:
                        if at <= number < at + len(piece):
                            found[number] = piece.slice(number - at, 1)
                    at += len(piece)
            first = end
        rows = []
        for number in numbers:
            if number not in found:
                raise DataError(
                    f"{path}: row {number} is missing, although the footer's row count includes it"
                )
            rows.append(found[number])
        return from_table(pa.Table.from_batches(rows))


@contextmanager
def _open_parquet(path: str | Path) -> Iterator[pq.ParquetFile]:
    if not Path(path).exists():
        raise DataError(f"{path}: no such file")
    if not Path(path).is_file():
        raise DataError(f"{path}: not a readable parquet file: it is not a regular file")
    with _naming(f"{path}: not a readable parquet file"), Path(path).open("rb") as stream:
        start = stream.read(16)
    if start and not start.startswith(_PARQUET_MARK):
        kind = "JSON lines" if start.lstrip().startswith(b"{") else "another format"
        raise DataError(
            f"{path}: not a readable parquet file: it starts with {start!r}, so it is {kind}; "
            "convert it, for example with pandas' DataFrame.to_parquet"
        )
    try:
        # not pq.read_table, which interprets a folder named `lr=1` as a partition
        with (
            _naming(f"{path}: not a readable parquet file"),
            pq.ParquetFile(path, page_checksum_verification=True) as file,
        ):
            _refuse_bomb(path, file)
            yield file
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def _refuse_bomb(
    path: str | Path,
    file: pq.ParquetFile,
    most_bytes: int | None = None,
    columns: Sequence[str] | None = None,
) -> None:
    """Reject files with a row group too large for memory: a row group can only be decompressed as a
    whole."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        size = group.total_byte_size
        if columns is not None:
            size = 0
            for index in range(group.num_columns):
                part = group.column(index)
                if part.path_in_schema.split(".")[0] in columns:
                    size += part.total_uncompressed_size
        if size < 0 or size > (most_bytes or memory // 2):
            limit = (
                "more than half of this machine's memory"
                if most_bytes is None
                else f"more than {most_bytes >> 20} MiB"
            )
            raise DataError(
                f"{path}: row group {number} decompresses to {size / 2**30:.1f} GiB, {limit}; "
                "write the file with smaller row groups"
            )


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Convert pyarrow errors to DataError, and I/O failures such as a full disk to StorageError.

    pyarrow raises ArrowInvalid for a damaged footer, OSError for a damaged page and ValueError for
    a bad name.
    """
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        storage = StorageError.of(error, what) if isinstance(error, OSError) else None
        raise (storage or DataError(f"{what}: {error}")) from error


def to_stream(batch: DataProto) -> bytes:
    """Encode the batch as one Arrow IPC stream followed by a checksum, for sockets and pipes."""
    sink = pa.BufferOutputStream()
    table = to_table(batch)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data + _CHECKSUM_MARK + zlib.crc32(data).to_bytes(4, "little")


def from_stream(data: bytes | memoryview) -> DataProto:
    """Read a batch from an Arrow IPC stream, with or without the checksum of `to_stream`.

    Raises:
        DataError: the stream is truncated or damaged.
    """
    stream = _without_checksum(memoryview(data))
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            table = reader.read_all()
        table.validate(full=True)  # offsets of a damaged stream may be out of bounds
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DataError(f"{len(data)} bytes are not a complete Arrow stream: {error}") from error
    if bytes(stream[-len(_STREAM_END) :]) != _STREAM_END:
        raise DataError(
            f"an Arrow stream of {len(data)} bytes has no end marker; it was truncated after a "
            "complete batch"
        )
    return from_table(table)


def _without_checksum(data: memoryview) -> memoryview:
    """Verify the checksum, if present, and return the stream without it."""
    size = len(_CHECKSUM_MARK)
    stream = data[: -size - 4]
    mark = data[-size - 4 : -4]
    found = data[-4:]
    if bytes(mark) != _CHECKSUM_MARK:
        return data
    expected = int.from_bytes(found, "little")
    actual = zlib.crc32(stream)
    if actual != expected:
        raise DataError(
            f"an Arrow stream of {len(data)} bytes is damaged: expected checksum {expected:08x}, "
            f"got {actual:08x}"
        )
    return stream


def _array(name: str, column: Column) -> tuple[pa.Array, dict[str, Any]]:
    if not isinstance(column, Jagged) and column.dtype == object:
        return _object_array(name, column)
    return _numeric_array(name, column), {}


def _numeric_array(name: str, column: Column) -> pa.Array:
    values = column.values if isinstance(column, Jagged) else column
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    array = pa.array(np.ascontiguousarray(native).reshape(-1))
    for size in reversed(values.shape[1:]):
        if size == 0:
            raise SchemaError(
                f"column {name!r}: Arrow does not support an inner dimension of size 0 "
                f"({describe(values)})"
            )
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return (
        pa.LargeListArray.from_arrays(pa.array(column.offsets), array)
        if isinstance(column, Jagged)
        else array
    )


def _object_array(name: str, column: np.ndarray) -> tuple[pa.Array, dict[str, Any]]:
    if all(value is None or isinstance(value, str) for value in column):
        return pa.array(column.tolist(), pa.large_string()), {}
    texts = []
    for i, value in enumerate(column):
        try:
            texts.append(json.dumps(_tagged(value)))
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"column {name!r}, row {i}: not JSON-serializable: {error}"
            ) from error
    return pa.array(texts, pa.large_string()), {"json": True}


def _tagged(value: Any) -> Any:
    """Encode `value` using only JSON types. Values that JSON cannot represent become {"$tag":
    ...}."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _tagged(entry) for key, entry in value.items()}
        return {"$items": [[_tagged(key), _tagged(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        entries = list(map(_tagged, value))
        return entries if isinstance(value, list) else {"$tuple": entries}
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.str, value.item()]}
    if isinstance(value, np.ndarray):
        return {
            "$array": [
                value.dtype.str,
                list(value.shape),
                list(map(_tagged, value.reshape(-1).tolist())),
            ]
        }
    return value


def _untagged(value: Any) -> Any:
    """Decode a value encoded by `_tagged`."""
    if isinstance(value, list):
        return list(map(_untagged, value))
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    return (
        _TAGS[tag](value[tag])
        if tag in _TAGS
        else {key: _untagged(entry) for key, entry in value.items()}
    )


def _read_array(content: Any) -> np.ndarray:
    kind, shape, entries = content
    array = np.empty(len(entries), np.dtype(kind))
    # a slice assignment would interpret lists of equal length as a matrix
    for i, entry in enumerate(entries):
        array[i] = _untagged(entry)
    return array.reshape(shape)


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$items": lambda pairs: {_untagged(key): _untagged(entry) for key, entry in pairs},
    "$tuple": lambda entries: tuple(map(_untagged, entries)),
    "$scalar": lambda content: np.dtype(content[0]).type(content[1]),
    "$array": _read_array,
}


def _note(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_KEY, b"{}")
    try:
        note = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"damaged hybridflow metadata {text[:80]!r}") from error
    return note if isinstance(note, dict) else {}


def _column(name: str, array: pa.Array, note: Mapping[str, Any]) -> Column:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if _is_number(_leaf(kind.value_type)):
            _refuse_nulls(name, array)
            offsets = array.offsets.to_numpy().astype(np.int64)
            return Jagged(_dense(name, array.flatten()), offsets - offsets[0])
    elif _is_number(_leaf(kind)):
        return _dense(name, array)
    if not (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_nested(kind)
        or pa.types.is_null(kind)
    ):
        raise SchemaError(
            f"column {name!r} has Arrow type {kind}, which is not supported in a batch"
        )
    values = array.to_pylist()
    if note.get("json"):
        try:
            values = [_untagged(json.loads(text)) for text in values]
        except (TypeError, ValueError) as error:
            raise SchemaError(f"column {name!r} contains invalid JSON: {error}") from error
    return objects(values)


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
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise SchemaError(
            f"column {name!r} has {array.null_count} missing values; fill them in or drop the rows"
        )
