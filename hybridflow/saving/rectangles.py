"""Writes a checkpoint's tensors: one file per rank that contains rectangles of global tensors as
raw bytes, hashed while writing.

Megatron's own writer forks two processes per rank from a process with gloo threads, and starts a
270 MB manager process that outlives a killed rank (filesystem_async.py:266 and :55). Here a rank
writes a single file in the calling thread, and no file requires pickle to read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from hybridflow.device.residency import memory_of
from hybridflow.errors import CheckpointError
from hybridflow.saving.manifest import FileRecord

Chunk = dict[str, Any]  # key, dtype, shape (global), start, size, file, offset, length


@dataclass(frozen=True)
class Rectangle:
    """A slice of a global tensor: `data` contains `key[global_offset : global_offset +
    local_shape]`, where `key` has the shape `global_shape`. Megatron's ShardedTensor has the same
    attributes.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The data's element type."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The data's shape."""
        return tuple(self.data.shape)


@dataclass(frozen=True)
class HfSlice:
    """A pair of equal slices: `source[source_start : source_start + shape]` in the Hugging Face
    model and `key[start : start + shape]` in the checkpoint. The key may have additional leading
    axes of length one.
    """

    source: str
    source_start: tuple[int, ...]
    shape: tuple[int, ...]
    key: str
    start: tuple[int, ...]


def size_of(tensor: Any) -> tuple[int, ...]:
    """Return a rectangle's shape within the global tensor, including prepended axes (layer,
    expert).
    """
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)


def write_tensors(
    folder: Path, rank: int, tensors: Iterable[Any]
) -> tuple[list[Chunk], dict[str, FileRecord]]:
    """Write this rank's rectangles (`Rectangle`, or Megatron's ShardedTensor) to `rank_R.bin`.

    Returns the rectangles' positions in the file, and the file's size and hash.

    Raises:
        OSError: the file could not be written, for example because the disk is full.
    """
    name = f"rank_{rank}.bin"
    hasher = xxhash.xxh3_128()
    offset = 0
    chunks: list[Chunk] = []
    with (folder / name).open("xb", buffering=1 << 20) as stream:
        for tensor in tensors:
            data = tensor.data.detach().cpu().contiguous()
            if data.nbytes:
                memory = memory_of(data)
                stream.write(memory)
                hasher.update(memory)
            chunks.append(_describe(tensor, name, offset, data.nbytes))
            offset += data.nbytes
        stream.flush()
        os.fsync(stream.fileno())
    return chunks, {name: FileRecord(offset, hasher.hexdigest())}


def _describe(tensor: Any, file: str, offset: int, length: int) -> Chunk:
    return {
        "key": tensor.key,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.global_shape),
        "start": list(tensor.global_offset),
        "size": list(size_of(tensor)),
        "file": file,
        "offset": offset,
        "length": length,
    }


def check_cover(chunks: Sequence[Chunk]) -> None:
    """Raise CheckpointError unless the rectangles cover every tensor exactly once."""
    seen: dict[str, tuple[list[int], int]] = {}
    starts = set()
    for chunk in chunks:
        key = chunk["key"]
        place = (chunk["key"], *chunk["start"])
        shape, covered = seen.get(key, (chunk["shape"], 0))
        ends = []
        for start, size in zip(chunk["start"], chunk["size"], strict=True):
            ends.append(start + size)
        if (
            shape != chunk["shape"]
            or place in starts
            or any(end > full for end, full in zip(ends, shape, strict=True))
        ):
            raise CheckpointError(
                f"ranks disagree about {key}: shape {shape}, but {chunk['shape']} at "
                f"{chunk['start']}"
            )
        starts.add(place)
        seen[key] = shape, covered + prod(chunk["size"])
    for key, (shape, covered) in seen.items():
        if covered != prod(shape):
            raise CheckpointError(
                f"the ranks wrote {covered} elements of {key} {shape}, expected {prod(shape)}"
            )
