"""Writes a Hugging Face folder (sharded safetensors, index and checksums) tensor by tensor, with at
most one tensor in memory.

Exported files are hashed with SHA-256, as used by `sha256sum -c checksums.sha256` and the hubs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import torch

from hybridflow.device.residency import memory_of
from hybridflow.errors import ModelError, naming
from hybridflow.models.family import Family, kept_dtypes
from hybridflow.models.model_folder import INDEX

CHECKSUMS = "checksums.sha256"
_NAMES = {
    **{
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.bool: "BOOL",
    },
    **{
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.uint8: "U8",
        torch.int8: "I8",
    },
    **{torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_of(name: str) -> torch.dtype | None:
    """Return the torch dtype for a safetensors dtype name, or None if it cannot be written."""
    return _DTYPES.get(name)


@dataclass(frozen=True)
class Entry:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def entries_of(family: Family, dtype: torch.dtype) -> list[Entry]:
    """Return entries for all tensors of a model, with weights in the given precision."""
    kept = kept_dtypes(family)
    entries: list[Entry] = []
    for name, shape in family.tensors().items():
        entries.append(Entry(name, shape, kept.get(name, dtype)))
    return entries


def shards_of(entries: Sequence[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """Divide tensors into files. Returns {file name: its tensors, in order}. A file exceeds
    `max_bytes` only if one of its tensors does.
    """
    files: list[list[Entry]] = []
    room = -1
    for entry in entries:
        if entry.size > room:
            files.append([])
            room = max_bytes
        files[-1].append(entry)
        room -= entry.size
    shards: dict[str, list[Entry]] = {}
    for number, tensors in enumerate(files, 1):
        shards[f"model-{number:05d}-of-{len(files):05d}.safetensors"] = tensors
    return shards


class ShardWriter:
    """Writes one safetensors file. Tensors must be added in the declared order."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self._left = list(reversed(entries))
        self._stream = path.open("xb")
        self._hash = sha256()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.size],
            }
            end += entry.size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        entry = self._left.pop()
        if (name, tuple(tensor.shape)) != (entry.name, entry.shape):
            raise ModelError(
                f"{self.path}: expected {entry.name} {entry.shape}, got {name} "
                f"{tuple(tensor.shape)}"
            )
        data = tensor.detach().to("cpu", entry.dtype).contiguous()
        if data.numel():
            self._write(memory_of(data))

    def close(self) -> str:
        """Sync the file to disk and return its SHA-256."""
        if self._left:
            raise ModelError(f"{self.path}: {self._left[-1].name} was declared but never added")
        with naming(self.path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        return self._hash.hexdigest()

    def _write(self, data: bytes | memoryview) -> None:
        with naming(self.path):
            self._stream.write(data)
        self._hash.update(data)


def write_surroundings(
    folder: Path,
    files: Mapping[str, Sequence[Entry]],
    checksums: Mapping[str, str],
    config: Mapping[str, object],
) -> None:
    """Write the index, config.json and checksums next to the shards, and sync them to disk."""
    weight_map = {}
    total = 0
    for name, entries in files.items():
        for entry in entries:
            weight_map[entry.name] = name
            total += entry.size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    texts = {
        INDEX: json.dumps(index, indent=2),
        "config.json": json.dumps(config, indent=2),
        CHECKSUMS: "".join(f"{digest}  {name}\n" for name, digest in sorted(checksums.items())),
    }
    for name, text in texts.items():
        with naming(folder / name), (folder / name).open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
