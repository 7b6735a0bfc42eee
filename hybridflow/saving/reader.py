"""Read a checkpoint's tensors region by region, as the global tensors they were saved as or as
Hugging Face tensors: no ranks, no Megatron, no pickle.

A checkpoint's `index.json` says which rectangles of which global tensor lie where in which file,
and which slice of which Hugging Face tensor is which part of a global tensor.
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
    """A `WeightSource` over the ranks' folder of a checkpoint (the one with the manifest)."""

    def __init__(self, folder: Path) -> None:
        """Read manifest and index. CheckpointError when the folder is no whole checkpoint."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        index = read_index(folder)
        self._chunks: dict[str, dict[Start, dict[str, Any]]] = {}  # by key and start
        for chunk in index["chunks"]:
            if chunk["file"] not in self.manifest.files or chunk["dtype"] not in _DTYPES:
                raise CheckpointError(
                    f"{folder}: the index names {chunk['file']} ({chunk['dtype']}), which is not "
                    "ours"
                )
            if chunk["offset"] + chunk["length"] > self.manifest.files[chunk["file"]].size:
                raise CheckpointError(
                    f"{folder}: the index looks for {chunk['key']} behind the end of "
                    f"{chunk['file']}"
                )
            if chunk["length"] != prod(chunk["size"]) * _DTYPES[chunk["dtype"]].itemsize:
                raise CheckpointError(
                    f"{folder}: {chunk['length']} bytes for {chunk['size']} of {chunk['key']}"
                )
            same = self._chunks.setdefault(chunk["key"], {})
            first = next(iter(same.values()), chunk)
            if tuple(chunk["start"]) in same or (first["shape"], first["dtype"]) != (
                chunk["shape"],
                chunk["dtype"],
            ):
                raise CheckpointError(f"{folder}: its index describes {chunk['key']} in two ways")
            same[tuple(chunk["start"])] = chunk
        self._refuse_shared_bytes()
        self._slices: dict[str, list[tuple[Start, Start, str, Start]]] = {}
        for source, source_start, shape, key, start in index["hf"]:
            self._slices.setdefault(source, []).append(
                (tuple(source_start), tuple(shape), key, tuple(start))
            )

    def _refuse_shared_bytes(self) -> None:
        """CheckpointError when two rectangles lie on the same bytes of a file."""
        ends: dict[str, int] = {}
        chunks = (
            chunk for same in self._chunks.values() for chunk in same.values() if chunk["length"]
        )
        for chunk in sorted(chunks, key=lambda one: (one["file"], one["offset"])):
            if chunk["offset"] < ends.get(chunk["file"], 0):
                raise CheckpointError(
                    f"{self.folder}: its index puts {chunk['key']} where another tensor lies in "
                    f"{chunk['file']}"
                )
            ends[chunk["file"]] = chunk["offset"] + chunk["length"]

    def read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        """A region of a Hugging Face tensor, in the precision of the checkpoint. A weight that has
        an adapter comes merged with it.

        Raises:
            CheckpointError: the checkpoint does not hold it, or its index contradicts itself.
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
                f"{self.folder}: its index does not describe {name}: {error}"
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
        """Adapters' factors, by PEFT's names, with their shapes; `read` takes these names too.
        Empty without adapters."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, slices in self._slices.items():
            if is_factor(name):
                shapes[name] = self._shape(slices[0][2])
        return shapes

    @torch.no_grad()
    def restore(self, tensors: Sequence[Any]) -> None:
        """Fill rectangles (`Rectangle`, or Megatron's ShardedTensor) in place with what was saved
        of them.

        Where a tensor may have another shape than it had (the rows that pad a vocabulary depend on
        the layout), what was not saved stays as it is.
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
            raise CheckpointError(f"{self.folder} holds no tensor {key}")
        return tuple(next(iter(self._chunks[key].values()))["shape"])

    def _read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        if name not in self._slices:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        found = None
        filled = 0
        for slice_start, slice_shape, key, key_start in self._slices[name]:
            low, size = _overlap(start, shape, slice_start, slice_shape)
            if not prod(size):
                continue
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
                f"{self.folder}: {name} has {filled} elements of the region {start}+{shape}"
            )
        return found

    def region(self, key: str, start: Start, size: Start) -> torch.Tensor:
        """A region of a global tensor, out of the rectangles it was saved in. CheckpointError when
        not all of it was saved."""
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
                        f"{self.folder}: its index describes parts of {key} twice, around {low}"
                    )
                parts.append((low, part))
                stored = self._stored(chunk, low, part)
                found = torch.empty(size, dtype=stored.dtype) if found is None else found
                found[_inside(low, part, start)] = stored
                filled += stored.numel()
        if found is None or filled != found.numel():
            raise CheckpointError(
                f"{self.folder}: the files hold {filled} elements of {key} at {start}+{size}"
            )
        return found

    def _stored(self, chunk: Mapping[str, Any], start: Start, size: Start) -> torch.Tensor:
        """A region of one rectangle; of its file the rows that the region touches are read."""
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
                    raise ValueError("the file ends too early")
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
    """Where two rectangles meet: (start, size); some size is zero where they do not."""
    low = tuple(max(a, b) for a, b in zip(start, other_start, strict=True))
    ends = (
        min(a + m, b + n) for a, m, b, n in zip(start, size, other_start, other_size, strict=True)
    )
    return low, tuple(max(end - begin, 0) for begin, end in zip(low, ends, strict=True))


def _inside(start: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """The region as an index into a tensor that begins at `origin`."""
    ranges = []
    for a, n, o in zip(start, size, origin, strict=True):
        ranges.append(slice(a - o, a - o + n))
    return tuple(ranges)
