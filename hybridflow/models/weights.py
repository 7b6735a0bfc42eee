"""Sources of model weights: a folder of safetensors, or a seeded initialisation."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridflow.config.model_config import read_model_config
from hybridflow.errors import ModelError
from hybridflow.models.family import Family
from hybridflow.models.fp8 import SCALE_SUFFIX, BlockQuantisation
from hybridflow.models.model_folder import INDEX, SINGLE, read_weight_map
from hybridflow.models.mxfp4 import BLOCKS, SCALES, packed_names, read_packed
from hybridflow.models.stored_names import Place, place_of
from hybridflow.models.vision import tower_of

# files copied together with weights: tokenizers, templates, image processors, generation settings,
# remote code, licences
_COMPANIONS = (
    *(
        "tokenizer*.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "*vocab*.json",
        "*vocab*.txt",
        "merges.txt",
    ),
    *(
        "*.model",
        "*.model.v[0-9]*",
        "*.tiktoken",
        "tekken.json",
        "*.jinja",
        "additional_chat_templates/*.jinja",
    ),
    *("chat_template.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "processor_config.json"),
    *("generation_config.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
_MOST_COMPANION_BYTES = 256 << 20  # the largest published tokenizers are 40 MB


def copy_companions(source: Path, target: Path) -> None:
    """Copy a published folder's regular files that are neither weights nor config.json, unchanged.

    Raises:
        ModelError: a file is implausibly large, so copying it might fill the disk.
    """
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                if file.stat().st_size > _MOST_COMPANION_BYTES:
                    raise ModelError(
                        f"{file} exceeds the limit of {_MOST_COMPANION_BYTES} bytes for a model's "
                        "companion files; download it again"
                    )
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy2(file, copy)


class WeightSource(Protocol):
    """Reads rectangular regions of HF tensors."""

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Read the region `[start, start + shape)` of tensor `name`."""


class RandomWeights:
    """A seeded initialisation that does not depend on the parallel layout.

    Every tensor has a separate generator seeded by (seed, HF name), so sharding never changes the
    values. (Megatron's own CPU initialisation gives every expert-parallel rank the same experts.)
    Norms scale by one and biases are zero; matrices are drawn from N(0, std).

    Args:
        zero_centered: norms that add 1 to their weights (`zero_centered_norms`).
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        seed: int,
        std: float,
        zero_centered: Collection[str] = (),
    ) -> None:
        self.tensors = dict(tensors)
        self.seed = seed
        self.std = std
        self.zero_centered = frozenset(zero_centered)

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Generate a region of the tensor in fp32."""
        full = self.tensors[name]
        if len(full) == 1:
            is_scale = _is_norm(name) and name not in self.zero_centered
            return torch.ones(shape) if is_scale else torch.zeros(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(full).normal_(0.0, self.std, generator=generator)
        return values[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def initial_weights(family: Family, seed: int) -> RandomWeights:
    """Return the initial weights of a model that has no checkpoint, with the standard deviation in
    `initializer_range`."""
    std = float(family.hf.get("initializer_range", 0.02))
    return RandomWeights(family.tensors(), seed, std, zero_centered_norms(family))


def zero_centered_norms(family: Family) -> frozenset[str]:
    """Return the names of the norm weights to which the model adds 1: none, or all but those of
    delta nets and of the vision tower."""
    if not family.megatron_config().get("layernorm_zero_centered_gamma"):
        return frozenset()
    tower = tower_of(family)
    others = set(tower.tensors()) if tower else set()
    return frozenset(
        name
        for name, shape in family.tensors().items()
        if len(shape) == 1 and _is_norm(name) and "linear_attn." not in name and name not in others
    )


def _is_norm(name: str) -> bool:
    return "norm" in name and not name.endswith(".bias")


def _opened(file: Path) -> Any:
    """Open a safetensors file. Raises OSError if it is a pipe, which would block, or a device."""
    from safetensors import safe_open

    if file.exists() and not file.is_file():
        raise OSError("not a regular file")
    return safe_open(file, framework="pt")


class SafetensorsFolder:
    """A Hugging Face folder: `model.safetensors`, or shards listed in
    `model.safetensors.index.json`.

    Tensors are read by the model's names, even if the folder stores them under others
    (`stored_names`). Block-wise fp8 weights and MXFP4 experts are dequantised with their scales on
    read.

    Raises:
        ModelError: the folder has no weights, or its config.json specifies an unsupported
            quantisation.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files: dict[str, str]
        self._open: dict[Path, Any] = {}  # each file is opened and its header parsed only once
        config = self.folder / "config.json"
        self.quantisation: BlockQuantisation | None = None
        self._hidden: int | None = None  # `hidden_size`, if known
        if config.exists():
            self.quantisation, self._hidden = _read_config(config)
        index = self.folder / INDEX
        if index.exists():
            self.files = read_weight_map(index)
        elif (self.folder / SINGLE).exists():
            from safetensors import SafetensorError

            file = self.folder / SINGLE
            try:
                with _opened(file) as handle:
                    self.files = dict.fromkeys(handle.keys(), file.name)
            except (SafetensorError, OSError, MemoryError) as error:
                raise ModelError(f"{file} is not a complete safetensors file: {error}") from error
        else:
            raise ModelError(
                f"{self.folder} contains neither model.safetensors nor "
                "model.safetensors.index.json; model.path must be a Hugging Face folder with "
                "weights"
            )
        self.packed = packed_names(self.files)  # tensors in MXFP4

    def names(self) -> set[str]:
        """Return the names of the tensors that can be read, excluding the scales of quantised
        weights."""
        scales = {f"{name}{SCALE_SUFFIX}" for name in self.files}
        parts = {f"{name}{part}" for name in self.packed for part in (BLOCKS, SCALES)}
        return (self.files.keys() | self.packed) - scales - parts

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Read only this region of a model tensor from disk.

        For an fp8 weight, also reads the scales of the region's blocks and returns fp32.
        """
        if name in self.packed:
            return read_packed(self._region, name, start, shape)
        place = self.place(name)
        values = place.matrix(self._region(place.tensor, *self._in_file(place, start, shape)))
        if values.element_size() > 1:
            return values
        scales = f"{place.tensor}{SCALE_SUFFIX}"
        if self.quantisation is None or scales not in self.files:
            raise ModelError(
                f"{self.folder}: {name} is {str(values.dtype).removeprefix('torch.')} without "
                f"block scales ({scales} and quantization_config in config.json), so its values "
                "are unknown"
            )
        factors = self._region(scales, *self.quantisation.blocks_of(start, shape))
        return self.quantisation.dequantise(values, factors, start)

    def place(self, name: str) -> Place:
        """Return the location of a model tensor in the folder."""
        found = place_of(name, self.files) or Place(name)
        if found.expert is None or self._hidden is None:
            return found
        # as transformers does, compare shapes: its own exports are not transposed
        hidden_dim = 1 if found.half is None else 2
        is_transposed = self.stored_shape(found.tensor)[hidden_dim] != self._hidden
        return replace(found, is_transposed=is_transposed)

    def _in_file(
        self, place: Place, start: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stored = () if place.expert is None else self.stored_shape(place.tensor)
        return place.region(start, shape, stored)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor, given its name in the folder."""
        with self._view(name) as view:
            return tuple(view.get_shape())

    def raw(self, name: str) -> torch.Tensor:
        """Return a complete tensor exactly as stored, given its name in the folder."""
        with self._view(name) as view:
            return view[...]

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the safetensors dtype name that `read` returns for a model
        tensor."""
        if name in self.packed:
            (experts, columns, groups, half), _ = self.form(f"{name}{BLOCKS}")
            return (experts, 2 * groups * half, columns), "BF16"
        place = self.place(name)
        with self._view(place.tensor) as view:
            return place.shape(view.get_shape()), view.get_dtype()

    @contextmanager
    def _view(self, name: str) -> Iterator[Any]:
        """Yield a slice handle for a tensor in its open file."""
        from safetensors import SafetensorError

        if name not in self.files:
            raise ModelError(
                f"{self.folder} has no tensor {name}; does its config.json belong to another model?"
            )
        file = self.folder / self.files[name]
        try:
            if file not in self._open:
                self._open[file] = _opened(file)
            yield self._open[file].get_slice(name)
        except (SafetensorError, OSError, MemoryError) as error:
            raise ModelError(f"{file}, tensor {name}: {error}") from error

    def _region(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        with self._view(name) as view:
            full = view.get_shape()
            if len(full) != len(shape) or any(
                s + n > f for s, n, f in zip(start, shape, full, strict=True)
            ):
                raise ModelError(
                    f"{self.folder}: {name} has shape {full}, which is too small for the region "
                    f"{start}+{shape} implied by config.json"
                )
            return view[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def _read_config(config: Path) -> tuple[BlockQuantisation | None, int | None]:
    try:
        values = read_model_config(config)
        return BlockQuantisation.of_checkpoint(values), values.get("hidden_size")
    except (ModelError, ValueError) as error:
        raise ModelError(f"{config}: {error}") from error
