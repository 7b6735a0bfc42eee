"""Weights of a published folder that training does not use, such as multi-token-prediction layers
(unless `actor.mtp.train` is set) and tensors that the family does not map. Checkpoints do not
contain them. An export copies them unchanged from that folder, and adjusts its config.json
accordingly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.model_config import published_form
from hybridflow.errors import ModelError
from hybridflow.models.family import Family, family_of
from hybridflow.models.fp8 import FP8, SCALE_SUFFIX
from hybridflow.models.mxfp4 import BLOCKS, SCALES
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.safetensors_file import Entry, dtype_of

if TYPE_CHECKING:
    import torch

_HEADS = "num_nextn_predict_layers"
_TIED = "lm_head.weight"


@dataclass(frozen=True)
class Carried:
    """The tensors to copy from `source`, and one message per kind of tensor that is copied or
    omitted.
    """

    source: SafetensorsFolder | None = None
    entries: tuple[Entry, ...] = ()
    lines: tuple[str, ...] = ()
    # {tensor of the folder: the tensor of the model that it duplicates}, e.g. the embedding of a
    # trained multi-token-prediction layer; an export writes the model's values
    aliases: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor exactly as stored in the folder."""
        assert self.source is not None  # set whenever there are entries
        return self.source.raw(name)

    def digest(self) -> str:
        """Return a digest that is equal on all ranks that see the same folder."""
        return sha256(repr((self.entries, sorted(self.aliases.items()))).encode()).hexdigest()


def _unmapped(source: SafetensorsFolder, mapped: Set[str]) -> list[str]:
    """Return the tensors of the folder that the model has under none of its names."""
    return [
        name
        for name in source.files
        if name not in mapped
        and name.removesuffix(SCALE_SUFFIX) not in mapped
        and name.removesuffix(BLOCKS).removesuffix(SCALES) not in source.packed
    ]


def carried_from(folder: Path | None, family: Family) -> Carried:
    """Return the tensors to copy from the model's original folder into an export of `family`. There
    are none if that folder does not exist, or if the model has a scalar head instead of the
    published one."""
    if folder is None or isinstance(family, ScalarHead):
        return Carried()
    try:
        source = SafetensorsFolder(folder)
    except ModelError as error:
        return Carried(
            lines=(f"weights that training does not use are not in the export: {error}",)
        )
    known: Mapping[str, str] = getattr(family, "aliases", dict)()
    aliases = {name: original for name, original in known.items() if name in source.files}
    mapped = family.tensors().keys() | known.keys()
    names = _unmapped(source, mapped)
    lines = []
    # a copy would hold the values from before training
    if _TIED in names and family.hf.get("tie_word_embeddings"):
        names.remove(_TIED)
        lines.append(
            f"{_TIED} is not in the export: with tie_word_embeddings it equals "
            "model.embed_tokens.weight"
        )
    entries = []
    unknown = []
    for name in names:
        try:
            shape, dtype = source.form(name)
        except ModelError as error:
            return Carried(
                lines=(f"weights that training does not use are not in the export: {error}",)
            )
        if (precision := dtype_of(dtype)) is None:
            unknown.append(f"{name} ({dtype})")
        else:
            entries.append(Entry(name, shape, precision))
    if entries:
        lines.append(
            f"{len(entries)} tensors that training does not use were copied unchanged from "
            f"{folder}: {_groups(entry.name for entry in entries)}"
        )
    if unknown:
        lines.append(
            "not in the export, because safetensors cannot store their precision: "
            f"{', '.join(unknown[:4])}"
        )
    return Carried(source, tuple(entries), tuple(lines), aliases)


def duplicates(carried: Carried, entries: Sequence[Entry]) -> list[Entry]:
    """Return an entry for each alias, in the form of the tensor that it duplicates."""
    written = {entry.name: entry for entry in entries}
    return [replace(written[original], name=alias) for alias, original in carried.aliases.items()]


def exported_config(
    hf_config: Mapping[str, Any], dtype: torch.dtype, entries: Iterable[Entry], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json for an export of these tensors, and a line for each changed field. The
    config sets one precision, under the key names of transformers 4 and 5. It declares quantisation
    only if there are fp8 tensors, multi-token prediction only if its layers are present, and custom
    code only if its files are in `folder`.
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
            f"the export's config.json sets {_HEADS} to 0 instead of {config[_HEADS]}, because "
            "the weights are missing"
        )
        config[_HEADS] = 0
    code = {}
    for key, name in (config.pop("auto_map", None) or {}).items():
        if _is_there(name, folder):
            code[key] = name
    return published_form({**config, "auto_map": code} if code else config), lines


def _groups(names: Iterable[str]) -> str:
    """Group tensor names by layer, and format them with counts, such as `model.layers.61 (784)`."""
    found = Counter(
        ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name
        for name in names
    )
    shown = []
    for name, count in found.items():
        shown.append(f"{name} ({count})" if count > 1 else name)
    return ", ".join(shown[:6]) + (" ..." if len(shown) > 6 else "")


def _unquantised(written: Mapping[str, Entry]) -> list[str]:
    """Return the names of modules and whole layers that contain no fp8 tensors; empty if the model
    has no fp8 tensors at all.
    """
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
    """Return a tensor's layer, such as `model.layers.3`, or its module if it does not belong to a
    layer."""
    return (
        ".".join(name.split(".")[:3])
        if name.startswith("model.layers.")
        else name.removesuffix(".weight")
    )


def _has_heads(hf_config: Mapping[str, Any], written: Iterable[str]) -> bool:
    """Return True if the export contains all tensors of the configured multi-token-prediction
    layers."""
    try:
        heads = (
            family_of(hf_config, mtp=True).tensors().keys() - family_of(hf_config).tensors().keys()
        )
    except ModelError:
        return False
    return bool(heads) and not heads - set(written)


def _is_there(code: object, folder: Path) -> bool:
    """Return True if the source file of each `module.Class` is in the folder or on a hub
    ("org/name--module.Class").
    """
    names = []
    for one in code if isinstance(code, list) else [code]:
        if isinstance(one, str):
            names.append(one)
    return all("--" in one or (folder / f"{one.partition('.')[0]}.py").is_file() for one in names)
