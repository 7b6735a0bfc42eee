"""The folder from which engines start, with a model's config, tokenizer and weights. The weights of
a checkpoint are exported to a temporary folder; those of a Hugging Face folder are linked. If only
the text model of a multimodal folder is trained, engines start from a copy of that text model,
unless the prompts contain images.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.model_config import MULTIMODAL, with_tower
from hybridflow.config.schema import RunConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ResourceError
from hybridflow.inference.source import Source
from hybridflow.models import FAMILIES, Family, family_of, use_family
from hybridflow.models.model_folder import INDEX, SINGLE, check_weights, read_weight_map
from hybridflow.models.served import check_served
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.observe.progress import Progress
from hybridflow.process.private_folder import temporary_private_folder
from hybridflow.saving import tools
from hybridflow.trainer import assets

if TYPE_CHECKING:
    from torch import Tensor

_SHARD_BYTES = 4 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZATION = "quantization_config"


@dataclass(frozen=True)
class Model:
    """A model on disk, ready for engines.

    Attributes:
        config: the configuration, with the model's folders.
        weights: a Hugging Face folder with the weights.
        engine_folder: the folder from which engines start.
        temporary: folder for all files that are removed afterwards.
    """

    config: RunConfig
    tokenizer: Tokenizer
    weights: Path
    engine_folder: Path
    temporary: Path

    def fill(self, target: Mapping[str, Tensor]) -> int:
        """Copy the weights to these tensors. Returns the number of bytes copied."""
        source = SafetensorsFolder(self.weights)
        size = 0
        for name, tensor in target.items():
            shape = tuple(tensor.shape)
            tensor.copy_(source.read(name, (0,) * len(shape), shape))
            size += tensor.nbytes
        return size


@contextmanager
def opened(source: Source, config: RunConfig, progress: Progress) -> Iterator[Model]:
    """Yield the model. Its temporary folder is created in TMPDIR and removed at the end of the
    block.

    Raises:
        ModelError: weights are missing or incomplete, or the engine would compute a different
            model.
        CheckpointError: a file of the checkpoint does not match its manifest.
        DataError: there is no usable tokenizer.
        ResourceError: TMPDIR has too little space for the weights.
    """
    use_family(config.model.family)
    if config.data.image_key is not None:
        source = replace(source, hf_config=with_tower(source.hf_config))
    family = _family_of(source)
    if family is not None:
        check_served(family, config)
    tokenizer = assets.open_tokenizer(_with_tokenizer(config, source))
    alone = MULTIMODAL in source.hf_config
    with temporary_private_folder("hf-model-") as temporary:
        weights = source.folder
        if source.manifest is not None:
            _check_room(source, temporary)
            weights = temporary / "weights"
            with progress.stage(f"export the weights of {source.folder.parent.name}"):
                tools.export(
                    source.folder, weights, None, _SHARD_BYTES, tokenizer.path, alone=alone
                )
        elif alone:
            _check_room(source, temporary)
            weights = temporary / "weights"
            with progress.stage(f"copy the text model of {source.folder}"):
                tools.import_(source.folder, weights, None, _SHARD_BYTES, alone=True)
        else:
            check_weights(weights, family.tensors() if family else ())
        given = replace(config.model, path=str(weights), hf_config={})
        config = replace(config, model=replace(given, tokenizer=str(tokenizer.path)))
        target = temporary / "engine"
        _write_engine_folder(target, weights, config, tokenizer)
        yield Model(config, tokenizer, weights.resolve(), target.resolve(), temporary)


def _with_tokenizer(config: RunConfig, source: Source) -> RunConfig:
    if config.model.tokenizer is not None:
        return config
    return replace(config, model=replace(config.model, tokenizer=str(source.folder)))


def _family_of(source: Source) -> Family | None:
    """Return the model's family; None if it is unknown, in which case only the engine can check the
    model.
    """
    known = source.hf_config.get("model_type") in FAMILIES.names()
    return family_of(source.hf_config) if known else None


def _check_room(source: Source, temporary: Path) -> None:
    tensors = family_of(source.hf_config).tensors().values()
    wanted = sum(map(prod, tensors)) * _BYTES.get(source.dtype, 4)
    free = shutil.disk_usage(temporary).free
    if wanted > free:
        raise ResourceError(
            f"the weights of {source.folder} take {wanted / 1e9:.1f} GB, but {temporary.parent} "
            f"has {free / 1e9:.1f} GB left; set TMPDIR to another disk, or pass the run's export"
        )


def _write_engine_folder(
    target: Path, weights: Path, config: RunConfig, tokenizer: Tokenizer
) -> None:
    resolved = assets.resolve_hf_config(config, tokenizer)
    assets.write_engine_folder(target, resolved, config.model.dtype, tokenizer)
    if quantization := resolved.get(_QUANTIZATION):
        # the files hold the quantized values
        file = target / "config.json"
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(values | {_QUANTIZATION: quantization}, indent=2))
    for name in _weight_files(weights):
        os.symlink((weights / name).resolve(), target / name)


def _weight_files(weights: Path) -> list[str]:
    """Return the names of the index file and of the files that it lists. Call it after
    `check_weights`.
    """
    if not (weights / INDEX).is_file():
        return [SINGLE]
    return [INDEX, *sorted(set(read_weight_map(weights / INDEX).values()))]
