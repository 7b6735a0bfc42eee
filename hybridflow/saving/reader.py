"""Reads a checkpoint's tensors by region, as saved global tensors or as Hugging Face tensors. Works
without ranks, Megatron or pickle.

A checkpoint's `index.json` maps rectangles of global tensors to file positions, and slices of
Hugging Face tensors to slices of global tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import CheckpointError
from hybridflow.models.lora import is_factor, merge, names_of
from hybridflow.saving.manifest import Manifest, read_index
from hybridflow.saving.rectangles import size_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
_DTYPES |= {
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
            if chunk["file"] not in self.manifest.files or chunk["dtype"] not in _DTYPES:
                raise CheckpointError(
                    f"{folder}: the index contains {chunk['file']} ({chunk['dtype']}), which is "
                    "not in the manifest or has an unsupported dtype"
                )
            if chunk["offset"] + chunk["length"] > self.manifest.files[chunk["file"]].size:
                raise CheckpointError(
                    f"{folder}: the index places {chunk['key']} beyond the end of {chunk['file']}"
                )
            if chunk["length"] != prod(chunk["size"]) * _DTYPES[chunk["dtype"]].itemsize:
                raise CheckpointError(
                    f"{folder}: the index lists {chunk['length']} bytes for {chunk['size']} of "
                    f"{chunk['key']}, which does not match its dtype"
                )
            same = self._chunks.setdefault(chunk["key"], {})
            first = next(iter(same.values()), chunk)
            if tuple(chunk["start"]) in same or (first["shape"], first["dtype"]) != (
                chunk["shape"],
                chunk["dtype"],
            ):
                raise CheckpointError(
                    f"{folder}: the index contains conflicting entries for {chunk['key']}"
                )
            same[tuple(chunk["start"])] = chunk
        self._refuse_shared_bytes()
        self._slices: dict[str, list[tuple[Start, Start, str, Start]]] = {}
        for source, source_start, shape, key, start in index["hf"]:
            self._slices.setdefault(source, []).append(
                (tuple(source_start), tuple(shape), key, tuple(start))
            )

    def _refuse_shared_bytes(self) -> None:
        """Raise CheckpointError if two rectangles share bytes of a file."""
        ends: dict[str, int] = {}
        chunks: list[Any] = []
        for same in self._chunks.values():
            chunks += [chunk for chunk in same.values() if chunk["length"]]
        for chunk in sorted(chunks, key=lambda one: (one["file"], one["offset"])):
            if chunk["offset"] < ends.get(chunk["file"], 0):
                raise CheckpointError(
                    f"{self.folder}: in the index, {chunk['key']} overlaps another tensor in "
                    f"{chunk['file']}"
                )
            ends[chunk["file"]] = chunk["offset"] + chunk["length"]

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
        rank = int(self.manifest.lora["rank"])
        factors = (
            self._read(a, (0, start[1]), (rank, shape[1])),
            self._read(b, (start[0], 0), (shape[0], rank)),
        )
        return merge(self._read(name, start, shape), *factors, self.manifest.lora["alpha"] / rank)

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
            lead, start, size = (
                tensor.prepend_axis_num,
                tuple(tensor.global_offset),
                size_of(tensor),
            )
            if tensor.allow_shape_mismatch:
                full = self._shape(tensor.key)
                size = tuple(
                    max(min(n, end - at), 0) for n, end, at in zip(size, full, start, strict=True)
                )
            if prod(size):
                inside = tuple(slice(0, n) for n in size[lead:])
                tensor.data.view(tuple(tensor.local_shape))[inside].copy_(
                    self.region(tensor.key, start, size).view(size[lead:])
                )

    def _shape(self, key: str) -> Start:
        if key not in self._chunks:
            raise CheckpointError(f"{self.folder} has no tensor {key}")
        return tuple(next(iter(self._chunks[key].values()))["shape"])

    def _read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        if name not in self._slices:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        found = None
        filled = 0
        parts: list[tuple[Start, Start]] = []
        for slice_start, slice_shape, key, key_start in self._slices[name]:
            low, size = _overlap(start, shape, slice_start, slice_shape)
            if not prod(size):
                continue
            if any(prod(_overlap(low, size, *other)[1]) for other in parts):
                raise CheckpointError(
                    f"{self.folder}: the index has overlapping entries for {name} near {low}"
                )
            parts.append((low, size))
            lead = len(key_start) - len(low)
            starts = []
            for base, a, b in zip(key_start[lead:], low, slice_start, strict=True):
                starts.append(base + a - b)
            inside = tuple(starts)
            values = self.region(key, (*key_start[:lead], *inside), (1,) * lead + size).view(size)
            found = torch.empty(shape, dtype=values.dtype) if found is None else found
            found[_inside(low, size, start)] = values
            filled += values.numel()
        if found is None or filled != found.numel():
            raise CheckpointError(
                f"{self.folder}: the index covers only {filled} elements of {name} in the region "
                f"{start}+{shape}"
            )
        return found

    def region(self, key: str, start: Start, size: Start) -> torch.Tensor:
        """Return a region of a global tensor, assembled from the saved rectangles. Raises
        CheckpointError if a part was not saved."""
        chunks = self._chunks.get(key, {})
        if not prod(size):
            return torch.empty(size)
        same = chunks.get(start)
        if same is not None and tuple(same["size"]) == size:
            return self._stored(same, start, size)
        found = None
        filled = 0
        parts: list[tuple[Start, Start]] = []
        for at, chunk in chunks.items():
            low, part = _overlap(start, size, at, tuple(chunk["size"]))
            if prod(part):
                if any(prod(_overlap(low, part, *other)[1]) for other in parts):
                    raise CheckpointError(
                        f"{self.folder}: the index has overlapping entries for {key} near {low}"
                    )
                parts.append((low, part))
                stored = self._stored(chunk, low, part)
                found = torch.empty(size, dtype=stored.dtype) if found is None else found
                found[_inside(low, part, start)] = stored
                filled += stored.numel()
        if found is None or filled != found.numel():
            raise CheckpointError(
                f"{self.folder}: the files contain only {filled} elements of {key} in the region "
                f"{start}+{size}"
            )
        return found

    def _stored(self, chunk: Mapping[str, Any], start: Start, size: Start) -> torch.Tensor:
        """Return a region of one rectangle. Reads only the overlapping rows from the file."""
        dtype = _DTYPES[chunk["dtype"]]
        whole = tuple(chunk["size"])
        axis = next((number for number, extent in enumerate(whole) if extent > 1), 0)
        row = prod(whole[axis + 1 :]) * dtype.itemsize
        first = start[axis] - chunk["start"][axis]
        data = bytearray(size[axis] * row)
        try:
            with (self.folder / chunk["file"]).open("rb") as file:
                file.seek(chunk["offset"] + first * row)
                if file.readinto(data) != len(data):
                    raise ValueError("the file is too short")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / chunk['file']} cannot be read at {chunk['offset']}: {error}"
            ) from error
        rows = torch.frombuffer(data, dtype=dtype).view(
            *whole[:axis], size[axis], *whole[axis + 1 :]
        )
        low = (*chunk["start"][:axis], start[axis], *chunk["start"][axis + 1 :])
        return rows[_inside(start, size, low)]


def _overlap(
    start: Start, size: Start, other_start: Sequence[int], other_size: Sequence[int]
) -> tuple[Start, Start]:
    """Return the intersection of two rectangles as (start, size). The size is zero if they do not
    overlap."""
    low = tuple(max(a, b) for a, b in zip(start, other_start, strict=True))
    ends = (
        min(a + m, b + n) for a, m, b, n in zip(start, size, other_start, other_size, strict=True)
    )
    return low, tuple(max(end - begin, 0) for begin, end in zip(low, ends, strict=True))


def _inside(start: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the region in a tensor whose first element is at `origin`."""
    ranges = []
    for a, n, o in zip(start, size, origin, strict=True):
        ranges.append(slice(a - o, a - o + n))
    return tuple(ranges)
