"""Reads a checkpoint's tensors by region, as saved global tensors or as Hugging Face tensors. Works
without ranks, Megatron or pickle.

A checkpoint's `index.json` maps rectangles of global tensors to file positions, and slices of
Hugging Face tensors to slices of global tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import CheckpointError
from hybridflow.models.lora import is_factor, merge, names_of
from hybridflow.saving.manifest import Manifest, read_index
from hybridflow.saving.rectangles import size_of

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}

Start = tuple[int, ...]


class CheckpointFolder:
    """A `WeightSource` that reads a checkpoint's role folder, i.e. the folder that contains the
    manifest.
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest and the index. Raises CheckpointError if the folder is not a complete
        checkpoint."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        index = read_index(folder)
        self._chunks: dict[str, dict[Start, dict[str, Any]]] = {}  # by key and start
        for chunk in index["chunks"]:
            self._add(chunk)
        self._refuse_shared_bytes()
        self._slices: dict[str, list[tuple[Start, Start, str, Start]]] = {}
        for source, source_start, shape, key, start in index["hf"]:
            entry = (tuple(source_start), tuple(shape), key, tuple(start))
            self._slices.setdefault(source, []).append(entry)

    def _add(self, chunk: dict[str, Any]) -> None:
        """Add a rectangle of the index. Raises CheckpointError if it contradicts the manifest or
        an earlier rectangle."""
        key = chunk["key"]
        file = chunk["file"]
        dtype = chunk["dtype"]
        size = chunk["size"]
        length = chunk["length"]
        if file not in self.manifest.files or dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.folder}: the index contains {file} ({dtype}), which is not in the manifest "
                "or has an unsupported dtype"
            )
        if chunk["offset"] + length > self.manifest.files[file].size:
            raise CheckpointError(f"{self.folder}: the index places {key} beyond the end of {file}")
        if length != prod(size) * _DTYPES[dtype].itemsize:
            raise CheckpointError(
                f"{self.folder}: the index lists {length} bytes for {size} of {key}, which does "
                "not match its dtype"
            )
        start = tuple(chunk["start"])
        same = self._chunks.setdefault(key, {})
        first = next(iter(same.values()), chunk)
        if start in same or first["shape"] != chunk["shape"] or first["dtype"] != dtype:
            raise CheckpointError(
                f"{self.folder}: the index contains conflicting entries for {key}"
            )
        same[start] = chunk

    def _refuse_shared_bytes(self) -> None:
        """Raise CheckpointError if two rectangles share bytes of a file."""
        extents = []
        for key, same in self._chunks.items():
            for chunk in same.values():
                if chunk["length"]:
                    extents.append((chunk["file"], chunk["offset"], chunk["length"], key))
        extents.sort(key=itemgetter(0, 1))
        ends: dict[str, int] = {}
        for file, offset, length, key in extents:
            if offset < ends.get(file, 0):
                raise CheckpointError(
                    f"{self.folder}: in the index, {key} overlaps another tensor in {file}"
                )
            ends[file] = offset + length

    def read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        """Read a region of a Hugging Face tensor, in the checkpoint's precision. Adapters are
        merged into their weights.

        Raises:
            CheckpointError: the checkpoint does not contain the region, or its index is
                inconsistent.
        """
        try:
            return self._merged(name, start, shape)
        except (
            ValueError,
            IndexError,
            RuntimeError,
            KeyError,
            TypeError,
            ZeroDivisionError,
        ) as error:
            raise CheckpointError(
                f"{self.folder}: the index entries of {name} are inconsistent: {error}"
            ) from error

    def _merged(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        a, b = names_of(name)
        if not name.endswith(".weight") or b not in self._slices:
            return self._read(name, start, shape)
        lora = self.manifest.lora
        rank = int(lora["rank"])
        factor_a = self._read(a, (0, start[1]), (rank, shape[1]))
        factor_b = self._read(b, (start[0], 0), (shape[0], rank))
        weight = self._read(name, start, shape)
        return merge(weight, factor_a, factor_b, lora["alpha"] / rank)

    def factors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapter factors, keyed by PEFT name; empty if there are no
        adapters. `read` also accepts these names.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, slices in self._slices.items():
            if is_factor(name):
                shapes[name] = self._shape(slices[0][2])
        return shapes

    @torch.no_grad()
    def restore(self, tensors: Sequence[Any]) -> None:
        """Fill rectangles (`Rectangle`, or Megatron's ShardedTensor) in place with their saved
        data.

        If a tensor's shape may have changed (a vocabulary's padding rows depend on the layout),
        elements that were not saved are left unchanged.
        """
        for tensor in tensors:
            start = tuple(tensor.global_offset)
            size = size_of(tensor)
            if tensor.allow_shape_mismatch:
                full = self._shape(tensor.key)
                _, size = _overlap(start, size, (0,) * len(full), full)
            if prod(size):
                local = size[tensor.prepend_axis_num :]
                inside = tuple(map(slice, local))
                saved = self.region(tensor.key, start, size).view(local)
                tensor.data.view(tuple(tensor.local_shape))[inside].copy_(saved)

    def _shape(self, key: str) -> Start:
        if key not in self._chunks:
            raise CheckpointError(f"{self.folder} has no tensor {key}")
        first = next(iter(self._chunks[key].values()))
        return tuple(first["shape"])

    def _read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        if name not in self._slices:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        assembly = _Assembly(self.folder, name, start, shape)
        for slice_start, slice_shape, key, key_start in self._slices[name]:
            low, size = assembly.part(slice_start, slice_shape)
            if prod(size):
                lead = len(key_start) - len(low)
                at = [*key_start[:lead]]
                for base, first, origin in zip(key_start[lead:], low, slice_start, strict=True):
                    at.append(base + first - origin)
                saved = self.region(key, tuple(at), (1,) * lead + size)
                assembly.fill(low, size, saved.view(size))
        values = assembly.values
        if values is None or assembly.filled != values.numel():
            raise CheckpointError(
                f"{self.folder}: the index covers only {assembly.filled} elements of {name} in the "
                f"region {start}+{shape}"
            )
        return values

    def region(self, key: str, start: Start, size: Start) -> torch.Tensor:
        """Return a region of a global tensor, assembled from the saved rectangles. Raises
        CheckpointError if a part was not saved."""
        chunks = self._chunks.get(key, {})
        if not prod(size):
            return torch.empty(size)
        same = chunks.get(start)
        if same is not None and tuple(same["size"]) == size:
            return self._stored(same, start, size)
        assembly = _Assembly(self.folder, key, start, size)
        for at, chunk in chunks.items():
            low, part = assembly.part(at, chunk["size"])
            if prod(part):
                assembly.fill(low, part, self._stored(chunk, low, part))
        values = assembly.values
        if values is None or assembly.filled != values.numel():
            raise CheckpointError(
                f"{self.folder}: the files contain only {assembly.filled} elements of {key} in the "
                f"region {start}+{size}"
            )
        return values

    def _stored(self, chunk: Mapping[str, Any], start: Start, size: Start) -> torch.Tensor:
        """Return a region of one rectangle. Reads only the overlapping rows from the file."""
        dtype = _DTYPES[chunk["dtype"]]
        shape = list(chunk["size"])
        low = list(chunk["start"])
        axis = next((number for number, extent in enumerate(shape) if extent > 1), 0)
        row_bytes = prod(shape[axis + 1 :]) * dtype.itemsize
        first = start[axis] - low[axis]
        data = bytearray(size[axis] * row_bytes)
        path = self.folder / chunk["file"]
        offset = chunk["offset"]
        try:
            with path.open("rb") as file:
                file.seek(offset + first * row_bytes)
                if file.readinto(data) != len(data):
                    raise ValueError("the file is too short")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read at {offset}: {error}") from error
        shape[axis] = size[axis]
        low[axis] = start[axis]
        rows = torch.frombuffer(data, dtype=dtype).view(shape)
        return rows[_inside(start, size, low)]


class _Assembly:
    """A region `[start : start + size]` of a tensor that is assembled from disjoint parts.

    Attributes:
        values: the region, or None while it has no part.
        filled: number of elements that the parts fill.
    """

    def __init__(self, folder: Path, name: str, start: Start, size: Start) -> None:
        self.folder = folder
        self.name = name
        self.start = start
        self.size = size
        self.values: torch.Tensor | None = None
        self.filled = 0
        self._parts: list[tuple[Start, Start]] = []

    def part(self, start: Start, size: Sequence[int]) -> tuple[Start, Start]:
        """Return the part of the region that a rectangle covers, as (start, size). Raises
        CheckpointError if an earlier rectangle covers an element of it."""
        low, part = _overlap(self.start, self.size, start, size)
        if prod(part):
            for other_low, other_part in self._parts:
                _, shared = _overlap(low, part, other_low, other_part)
                if prod(shared):
                    raise CheckpointError(
                        f"{self.folder}: the index has overlapping entries for {self.name} near "
                        f"{low}"
                    )
            self._parts.append((low, part))
        return low, part

    def fill(self, low: Start, part: Start, values: torch.Tensor) -> None:
        """Copy the values of a part into the region."""
        if self.values is None:
            self.values = torch.empty(self.size, dtype=values.dtype)
        self.values[_inside(low, part, self.start)] = values
        self.filled += values.numel()


def _overlap(
    start: Start, size: Start, other_start: Sequence[int], other_size: Sequence[int]
) -> tuple[Start, Start]:
    """Return the intersection of two rectangles as (start, size). The size is zero if they do not
    overlap."""
    lows = []
    sizes = []
    for a, m, b, n in zip(start, size, other_start, other_size, strict=True):
        low = max(a, b)
        end = min(a + m, b + n)
        lows.append(low)
        sizes.append(max(end - low, 0))
    return tuple(lows), tuple(sizes)


def _inside(start: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the region in a tensor whose first element is at `origin`."""
    ranges = []
    for first, length, base in zip(start, size, origin, strict=True):
        offset = first - base
        ranges.append(slice(offset, offset + length))
    return tuple(ranges)
