"""The Hugging Face tensors inside a checkpoint, read slice by slice: no ranks, no Megatron, no pickled metadata.

A checkpoint's `index.json` says which rectangles of which global tensor lie where in which file, and which slice of
which Hugging Face tensor is which part of a global tensor.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import CheckpointError
from hybridflow.models.lora import is_factor, merge, names_of
from hybridflow.saving.manifest import Manifest, read_index

_KEPT_BYTES = 256 << 20  # of rectangles just read: a fused projection is asked for once a head

Start = tuple[int, ...]


class CheckpointFolder:
    """A `WeightSource` over the ranks' folder of a checkpoint (the one with the manifest)."""

    def __init__(self, folder: Path) -> None:
        """CheckpointError when the folder is no whole checkpoint."""
        self.folder, self.manifest = folder, Manifest.read(folder)
        index = read_index(folder)
        self._chunks: dict[str, list[dict[str, Any]]] = {}
        for chunk in index["chunks"]:
            self._chunks.setdefault(chunk["key"], []).append(chunk)
        self._slices: dict[str, list[tuple[Start, Start, str, Start]]] = {}
        for source, source_start, shape, key, start in index["hf"]:
            self._slices.setdefault(source, []).append((tuple(source_start), tuple(shape), key, tuple(start)))
        self._kept: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        """See `WeightSource.read`; in the precision of the checkpoint. A weight that has an adapter comes merged with
        it."""
        a, b = names_of(name)
        if not name.endswith(".weight") or b not in self._slices:
            return self._read(name, start, shape)
        rank = int(self.manifest.lora["rank"])
        factors = self._read(a, (0, start[1]), (rank, shape[1])), self._read(b, (start[0], 0), (shape[0], rank))
        return merge(self._read(name, start, shape), *factors, self.manifest.lora["alpha"] / rank)

    def factors(self) -> dict[str, tuple[int, ...]]:
        """Adapters' factors, by PEFT's names, with their shapes; `read` takes these names too. Empty without
        adapters."""
        return {
            name: tuple(self._chunks[slices[0][2]][0]["shape"])
            for name, slices in self._slices.items()
            if is_factor(name)
        }

    def _read(self, name: str, start: Start, shape: Start) -> torch.Tensor:
        if name not in self._slices:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        found, filled = None, 0
        for slice_start, slice_shape, key, key_start in self._slices[name]:
            low = tuple(max(a, b) for a, b in zip(start, slice_start, strict=True))
            high = tuple(min(a + m, b + n) for a, m, b, n in zip(start, shape, slice_start, slice_shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            lead = len(key_start) - len(low)
            inside = tuple(base + a - b for base, a, b in zip(key_start[lead:], low, slice_start, strict=True))
            size = tuple(b - a for a, b in zip(low, high, strict=True))
            values = self.region(key, (*key_start[:lead], *inside), (1,) * lead + size).view(size)
            found = torch.empty(shape, dtype=values.dtype) if found is None else found
            found[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))] = values
            filled += values.numel()
        if found is None or filled != found.numel():
            raise CheckpointError(f"{self.folder}: {name} has {filled} elements of the region {start}+{shape}")
        return found

    def region(self, key: str, start: Start, size: Start) -> torch.Tensor:
        """A region of a global tensor, out of the rectangles it was saved in. CheckpointError when no file holds it."""
        found = None
        for chunk in self._chunks.get(key, ()):
            low = [max(a, b) for a, b in zip(start, chunk["start"], strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(start, size, chunk["start"], chunk["size"], strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            stored = self._stored(chunk)[
                tuple(slice(a - b, c - b) for a, c, b in zip(low, high, chunk["start"], strict=True))
            ]
            found = torch.empty(size, dtype=stored.dtype) if found is None else found
            found[tuple(slice(a - b, c - b) for a, c, b in zip(low, high, start, strict=True))] = stored
        if found is None:
            raise CheckpointError(f"{self.folder}: no file holds {key} at {start}")
        return found

    def _stored(self, chunk: Mapping[str, Any]) -> torch.Tensor:
        """One rectangle as it was written; those read last are kept."""
        place = (chunk["file"], chunk["offset"])
        if place not in self._kept:
            try:
                with (self.folder / chunk["file"]).open("rb") as file:
                    file.seek(chunk["offset"])
                    tensor = torch.load(io.BytesIO(file.read(chunk["length"])), map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                raise CheckpointError(
                    f"{self.folder / chunk['file']} cannot be read at {chunk['offset']}: {error}"
                ) from error
            while self._kept and tensor.nbytes + sum(kept.nbytes for kept in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            self._kept[place] = tensor
        return self._kept[place]
