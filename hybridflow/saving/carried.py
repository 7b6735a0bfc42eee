"""Weights of a published folder that training does not touch (layers for multi-token prediction,
whatever else its family does not map): an export gets them as they came, and its config.json
announces what is there.

Checkpoints do not hold them; they are read from the folder again when an export is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ModelError
from hybridflow.models.family import Family, family_of
from hybridflow.models.fp8 import FP8, SCALE_SUFFIX
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.safetensors_file import Entry, dtype_of

if TYPE_CHECKING:
    import torch

_HEADS = "num_nextn_predict_layers"
_TIED = "lm_head.weight"


@dataclass(frozen=True)
class Carried:
    """Tensors to copy from `source`, and one line about each kind that is copied or left out."""

    source: SafetensorsFolder | None = None
    entries: tuple[Entry, ...] = ()
    lines: tuple[str, ...] = ()

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the folder."""
        assert self.source is not None  # there are entries
        return self.source.raw(name)

    def digest(self) -> str:
        """The same on all ranks that see the same folder."""
        return sha256(repr(self.entries).encode()).hexdigest()


def carried_from(folder: Path | None, family: Family) -> Carried:
    """What an export of `family` takes from the folder that the model came from; nothing when the
    model has a scalar head in place of the published one, or came from no folder."""
    if folder is None or isinstance(family, ScalarHead):
        return Carried()
    try:
        source = SafetensorsFolder(folder)
    except ModelError as error:
        return Carried(
            lines=(f"weights that training does not touch are not in the export: {error}",)
        )
    mapped = family.tensors().keys()
    names = [
        name
        for name in source.files
        if name not in mapped and name.removesuffix(SCALE_SUFFIX) not in mapped
    ]
    lines = []
    # it would keep the values from before the training
    if _TIED in names and family.hf.get("tie_word_embeddings"):
        names.remove(_TIED)
        lines.append(
            f"{_TIED} is not in the export: tie_word_embeddings makes it model.embed_tokens.weight"
        )
    entries = []
    unknown = []
    for name in names:
        try:
            shape, dtype = source.form(name)
        except ModelError as error:
            return Carried(
                lines=(f"weights that training does not touch are not in the export: {error}",)
            )
        if (known := dtype_of(dtype)) is None:
            unknown.append(f"{name} ({dtype})")
        else:
            entries.append(Entry(name, shape, known))
    if entries:
        lines.append(
            f"{len(entries)} tensors that training does not touch were copied from {folder} as "
            f"they came: {_groups(entry.name for entry in entries)}"
        )
    if unknown:
        lines.append(
            f"not in the export, of a precision that cannot be written: {', '.join(unknown[:4])}"
        )
    return Carried(source, tuple(entries), tuple(lines))


def exported_config(
    hf_config: Mapping[str, Any], dtype: torch.dtype, entries: Iterable[Entry], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """(config.json of an export with these tensors, a line for each field that had to change).

    It states one precision, by the names of transformers 4 and 5; a quantisation only of tensors
    that are in fp8; multi-token prediction only where its layers are there; and code only of files
    in `folder`.
    """
    written = {entry.name: entry for entry in entries}
    lines = []
    precision = str(dtype).removeprefix("torch.")
    config = {**hf_config, "dtype": precision, "torch_dtype": precision}
    quantisation = config.pop("quantization_config", None)
    if quantisation and (skipped := _unquantised(written)):
        config["quantization_config"] = {**quantisation, "modules_to_not_convert": skipped}
    if config.get(_HEADS) and not _has_heads(hf_config, written.keys()):
        lines.append(
            f"config.json of the export says {_HEADS} 0, not {config[_HEADS]}: their weights are "
            "not there"
        )
        config[_HEADS] = 0
    code = {}
    for key, name in (config.pop("auto_map", None) or {}).items():
        if _is_there(name, folder):
            code[key] = name
    return ({**config, "auto_map": code} if code else config), lines


def _groups(names: Iterable[str]) -> str:
    """`model.layers.61 (784)`, by layer and else by name."""
    found = Counter(
        ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name
        for name in names
    )
    shown = []
    for name, count in found.items():
        shown.append(f"{name} ({count})" if count > 1 else name)
    return ", ".join(shown[:6]) + (" ..." if len(shown) > 6 else "")


def _unquantised(written: Mapping[str, Entry]) -> list[str]:
    """Modules and whole layers without a tensor in fp8; nothing where no tensor is."""
    quantised = set()
    for name, entry in written.items():
        if str(entry.dtype).endswith(FP8):
            quantised.add(name)
    if not quantised:
        return []
    layers = set(map(_layer, quantised))
    plain = (
        name for name, entry in written.items() if len(entry.shape) == 2 and name not in quantised
    )
    return list(dict.fromkeys(
        name.removesuffix(".weight") if _layer(name) in layers else _layer(name)
        for name in plain
        if name.endswith(".weight")
    ))  # fmt: skip


def _layer(name: str) -> str:
    """`model.layers.3` of a tensor in it, else its module."""
    return (
        ".".join(name.split(".")[:3])
        if name.startswith("model.layers.")
        else name.removesuffix(".weight")
    )


def _has_heads(hf_config: Mapping[str, Any], written: Iterable[str]) -> bool:
    """Whether every tensor of the multi-token-prediction layers that the config announces is
    written."""
    try:
        heads = (
            family_of(hf_config, mtp=True).tensors().keys() - family_of(hf_config).tensors().keys()
        )
    except ModelError:
        return False
    return bool(heads) and not heads - set(written)


def _is_there(code: object, folder: Path) -> bool:
    """Whether the file of `module.Class` is in the folder; one that lies in a hub
    ("org/name--module.Class") is."""
    names = []
    for one in code if isinstance(code, list) else [code]:
        if isinstance(one, str):
            names.append(one)
    return all("--" in one or (folder / f"{one.partition('.')[0]}.py").is_file() for one in names)
