"""The files of a checkpoint: one a rank, holding rectangles of global tensors as `torch.save` writes them, hashed on
the way.

Megatron's own writer forks two processes a rank out of one that runs gloo's threads, and starts a manager of 270 MB
beside it that outlives a killed rank (filesystem_async.py:266 and :55). Here a rank writes one file itself, in whatever
thread calls.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from hybridflow.errors import CheckpointError
from hybridflow.saving.manifest import FileRecord

Chunk = dict[str, Any]  # key, dtype, shape (global), start, size, file, offset, length


@dataclass(frozen=True)
class Rectangle:
    """`data` is `key[global_offset : +local_shape]` of a tensor of `global_shape`. Megatron's ShardedTensor has the
    same attributes."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the data."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the data."""
        return tuple(self.data.shape)


@dataclass(frozen=True)
class HfSlice:
    """`source[source_start : +shape]` of the Hugging Face model is `key[start : +shape]` of the checkpoint (leading
    ones of key apart)."""

    source: str
    source_start: tuple[int, ...]
    shape: tuple[int, ...]
    key: str
    start: tuple[int, ...]


class HashedFile:
    """A new file that is hashed as it is written, and remembers the first error of the system.

    torch turns an exception inside `write` into one of its own ("unexpected pos"); `error` still has the cause.
    """

    def __init__(self, path: Path) -> None:
        self._stream, self._hasher = path.open("xb", buffering=1 << 20), xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append."""
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._hasher.update(data)
        written = memoryview(data).nbytes
        self.size += written
        return written

    def flush(self) -> None:
        """Hand everything to the system."""
        self._stream.flush()

    def finish(self) -> FileRecord:
        """Close it when all of it is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return FileRecord(self.size, self._hasher.hexdigest())

    def abandon(self) -> None:
        """Close it without complaint."""
        with contextlib.suppress(OSError):
            self._stream.close()


def write_tensors(folder: Path, rank: int, tensors: Iterable[Any]) -> tuple[list[Chunk], dict[str, FileRecord]]:
    """Write this rank's rectangles (`Rectangle`, or Megatron's ShardedTensor) to `__RANK_0.distcp`.

    Returns what lies where in it, and the file's size and hash.

    Raises:
        OSError: as the system gave it (a full disk, say).
    """
    name = f"__{rank}_0.distcp"
    file, chunks = HashedFile(folder / name), []
    try:
        with _without_crc():
            for tensor in tensors:
                start = file.size
                torch.save(_own_storage(tensor.data).view(_size(tensor)), cast(IO[bytes], file))
                chunks.append(_describe(tensor, name, start, file.size - start))
        return chunks, {name: file.finish()}
    except Exception as error:
        raise file.error or error from error
    finally:
        file.abandon()


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    """torch's CRC-32 takes five times as long as our hash of the same bytes (0.8 against 4 GB/s); `torch.load` does not
    look at it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _own_storage(data: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU in a storage no larger than itself: `torch.save` writes whole storages."""
    data = data.cpu()
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()


def _size(tensor: Any) -> tuple[int, ...]:
    """The rectangle's size in the global tensor, prepended axes (layer, expert) included."""
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)


def _describe(tensor: Any, file: str, offset: int, length: int) -> Chunk:
    return {
        "key": tensor.key,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.global_shape),
        "start": list(tensor.global_offset),
        "size": list(_size(tensor)),
        "file": file,
        "offset": offset,
        "length": length,
    }


def check_cover(chunks: Sequence[Chunk]) -> None:
    """CheckpointError when the rectangles do not cover every tensor exactly."""
    seen: dict[str, tuple[list[int], int]] = {}
    starts = set()
    for chunk in chunks:
        key, place = chunk["key"], (chunk["key"], *chunk["start"])
        shape, covered = seen.get(key, (chunk["shape"], 0))
        ends = [start + size for start, size in zip(chunk["start"], chunk["size"], strict=True)]
        if shape != chunk["shape"] or place in starts or any(end > full for end, full in zip(ends, shape, strict=True)):
            raise CheckpointError(f"two ranks disagree about {key} {shape}: {chunk['shape']} at {chunk['start']}")
        starts.add(place)
        seen[key] = shape, covered + prod(chunk["size"])
    for key, (shape, covered) in seen.items():
        if covered != prod(shape):
            raise CheckpointError(f"the ranks hold {covered} elements of {key} {shape}, which has {prod(shape)}")


def write_bytes(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
