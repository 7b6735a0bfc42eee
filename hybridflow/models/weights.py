"""Where the values of a checkpoint come from: a folder of safetensors, or a seeded initialisation."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from hybridflow.errors import ModelError
from hybridflow.models.fp8 import SCALE_SUFFIX, BlockQuantisation

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy those of the named files that exist."""
    for name in names:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


class WeightSource(Protocol):
    """Reads rectangles of HF tensors."""

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The region `[start, start + shape)` of tensor `name`."""
        ...


class RandomWeights:
    """A seeded initialisation that does not depend on the parallel layout.

    Every tensor has a generator of its own, seeded by (seed, HF name), so that rank cuts never change the values.
    (Megatron's own CPU initialisation gives every expert-parallel rank the same experts.) Norms are one, biases zero,
    matrices are N(0, std).
    """

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], seed: int, std: float) -> None:
        self.tensors, self.seed, self.std = dict(tensors), seed, std

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """fp32."""
        full = self.tensors[name]
        if len(full) == 1:
            return torch.ones(shape) if "norm" in name else torch.zeros(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(full).normal_(0.0, self.std, generator=generator)
        return values[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


class SafetensorsFolder:
    """A Hugging Face folder: `model.safetensors`, or shards listed in `model.safetensors.index.json`.

    Weights in block-wise fp8 are read with their scales, block by block.

    Raises:
        ModelError: the folder has no weights, or its config.json names a quantisation that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config = self.folder / "config.json"
        self.quantisation = _quantisation_of(config) if config.exists() else None
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self.folder / "model.safetensors").exists():
            from safetensors import safe_open

            with safe_open(self.folder / "model.safetensors", framework="pt") as handle:
                self.files = dict.fromkeys(handle.keys(), "model.safetensors")
        else:
            raise ModelError(
                f"{self.folder} holds no model.safetensors and no model.safetensors.index.json; model.path must be a "
                "Hugging Face folder with weights"
            )

    def names(self) -> set[str]:
        """The tensors that `read` takes: scales belong to their weights."""
        scales = {f"{name}{SCALE_SUFFIX}" for name in self.files}
        return self.files.keys() - scales

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Only the region is read from the disk, and of an fp8 weight the scales of its blocks; that one is fp32."""
        values = self._region(name, start, shape)
        if values.element_size() > 1:
            return values
        scales = f"{name}{SCALE_SUFFIX}"
        if self.quantisation is None or scales not in self.files:
            raise ModelError(
                f"{self.folder}: {name} is {str(values.dtype).removeprefix('torch.')} without a scale for each block "
                f"({scales} and quantization_config in config.json), so its values are not known"
            )
        factors = self._region(scales, *self.quantisation.blocks_of(start, shape))
        return self.quantisation.dequantise(values, factors, start)

    def _region(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        from safetensors import safe_open

        if name not in self.files:
            raise ModelError(f"{self.folder} has no tensor {name}; is its config.json of another model?")
        with safe_open(self.folder / self.files[name], framework="pt") as handle:
            view = handle.get_slice(name)
            full = view.get_shape()
            if any(s + n > f for s, n, f in zip(start, shape, full, strict=True)):
                raise ModelError(
                    f"{self.folder}: {name} has shape {full}, too small for the region {start}+{shape} that "
                    "config.json implies"
                )
            return view[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def _quantisation_of(config: Path) -> BlockQuantisation | None:
    try:
        return BlockQuantisation.of_checkpoint(json.loads(config.read_text(encoding="utf-8")))
    except (ModelError, ValueError) as error:
        raise ModelError(f"{config}: {error}") from error
