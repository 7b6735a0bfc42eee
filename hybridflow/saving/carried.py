"""Weights of a published folder that training does not use, such as multi-token-prediction layers
(unless `actor.mtp.train` is set), the vision tower next to a text model, and tensors that the
family does not map. Checkpoints do not contain them. An export copies them unchanged from that
folder, and adjusts its config.json accordingly. Trained tensors are exported under the names, and
in the stacked form, that the published folder uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.model_config import MULTIMODAL, folder_form, published_form
from hybridflow.errors import ModelError
from hybridflow.models.family import Family, family_of
from hybridflow.models.fp8 import FP8, SCALE_SUFFIX
from hybridflow.models.mxfp4 import BLOCKS, SCALES
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.stored_names import Place, stacked_place, tower_part
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.ownership import OwnedPiece
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
    # {tensor of the model: its place in the export}, if that is not the whole tensor of this name
    places: Mapping[str, Place] = field(default_factory=dict)
    # whether the export has the form of a folder whose text model is trained alone
    is_multimodal: bool = False

    def place(self, name: str) -> Place:
        """Return the location of a model tensor in the export."""
        return self.places.get(name) or Place(name)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor exactly as stored in the folder."""
        assert self.source is not None  # set whenever there are entries
        return self.source.raw(name)

    def digest(self) -> str:
        """Return a digest that is equal on all ranks that see the same folder."""
        held = (self.entries, sorted(self.aliases.items()), sorted(self.places.items()))
        return sha256(repr(held).encode()).hexdigest()


def _unmapped(source: SafetensorsFolder, mapped: Set[str]) -> list[str]:
    """Return the names of the folder's tensors that are not part of the model."""
    held = {source.place(name).tensor for name in mapped}
    return [
        name
        for name in source.files
        if name not in held
        and name.removesuffix(SCALE_SUFFIX) not in held
        and name.removesuffix(BLOCKS).removesuffix(SCALES) not in source.packed
    ]


def carried_from(folder: Path | None, family: Family) -> Carried:
    """Return the tensors to copy from the model's original folder into an export of `family`. There
    are none if that folder does not exist, or if the model has a scalar head instead of the
    published one."""
    if folder is None or isinstance(family, ScalarHead):
        return Carried(places=_own_places(family))
    try:
        source = SafetensorsFolder(folder)
    except ModelError as error:
        return nothing_from(family, error)
    known: Mapping[str, str] = getattr(family, "aliases", dict)()
    aliases = {name: original for name, original in known.items() if name in source.files}
    mapped = family.tensors().keys() | known.keys()
    names = _unmapped(source, mapped)
    lines = []
    # a copy would hold the values from before training
    tied = source.place(_TIED).tensor
    if tied in names and family.hf.get("tie_word_embeddings"):
        names.remove(tied)
        lines.append(
            f"{tied} is not in the export: with tie_word_embeddings it equals "
            f"{source.place('model.embed_tokens.weight').tensor}"
        )
    try:
        entries, said = _copied(source, names)
    except ModelError as error:
        return nothing_from(family, error)
    lines += said
    is_multimodal = MULTIMODAL in family.hf
    if is_multimodal and not any(map(tower_part, names)):
        return nothing_from(family, f"{folder} has no vision tower")
    places = {name: source.place(name) for name in family.tensors()}
    moved = {name: place for name, place in places.items() if place != Place(name)}
    return Carried(source, tuple(entries), tuple(lines), aliases, moved, is_multimodal)


def _copied(source: SafetensorsFolder, names: Iterable[str]) -> tuple[list[Entry], list[str]]:
    """Return an entry for each of the folder's tensors `names` that can be written, and messages
    about copied and omitted tensors."""
    entries = []
    unknown = []
    lines = []
    for name in names:
        shape, dtype = source.form(name)
        if (precision := dtype_of(dtype)) is None:
            unknown.append(f"{name} ({dtype})")
        else:
            entries.append(Entry(name, shape, precision))
    if entries:
        lines.append(
            f"{len(entries)} tensors that training does not use were copied unchanged from "
            f"{source.folder}: {_groups(entry.name for entry in entries)}"
        )
    if unknown:
        lines.append(
            "not in the export, because safetensors cannot store their precision: "
            f"{', '.join(unknown[:4])}"
        )
    return entries, lines


def nothing_from(family: Family, why: object) -> Carried:
    """Return an empty result with the reason why nothing is copied from the folder."""
    alone = f", which is the text model alone (model_type {family.hf['model_type']})"
    which = alone if MULTIMODAL in family.hf else ""
    return Carried(
        lines=(f"weights that training does not use are not in the export{which}: {why}",),
        places=_own_places(family),
    )


def _own_places(family: Family) -> dict[str, Place]:
    """Return the places of experts in an export without an original folder. They are stacked and
    transposed, as published, if transformers reads the family only in that form
    (`stacks_experts`).
    """
    found: dict[str, Place] = {}
    for name, shape in family.tensors().items() if getattr(family, "stacks_experts", False) else ():
        if (place := stacked_place(name)) is not None:
            _, rows, columns = place.stored_shape(shape, 1)
            # readers compare shapes, and do not transpose squares
            found[name] = replace(place, is_transposed=rows != columns)
    return found


def entries_with(carried: Carried, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of an export: the model's tensors as stored in the folder, the aliases,
    and the copied tensors."""
    written: dict[str, Entry] = {}
    for entry in entries:
        place = carried.place(entry.name)
        experts = 1 + (place.expert or 0)  # of the last one, all of them
        written[place.tensor] = Entry(
            place.tensor, place.stored_shape(entry.shape, experts), entry.dtype
        )
    aliases = (
        replace(written[carried.place(original).tensor], name=alias)
        for alias, original in carried.aliases.items()
    )
    return [*written.values(), *aliases, *carried.entries]


def sources_with(carried: Carried, names: Iterable[str]) -> dict[str, list[tuple[str, Place]]]:
    """Return {exported tensor: [(tensor of the model, its place in the exported tensor)]}. Copied
    tensors are omitted.

    Args:
        names: the tensors of the model.
    """
    found: dict[str, list[tuple[str, Place]]] = {}
    for name in names:
        place = carried.place(name)
        found.setdefault(place.tensor, []).append((name, place))
    aliases = {
        alias: found[carried.place(original).tensor] for alias, original in carried.aliases.items()
    }
    return found | aliases


def owners_with(
    carried: Carried, owners: Mapping[str, Sequence[OwnedPiece]]
) -> dict[str, list[OwnedPiece]]:
    """Return {exported tensor: its slices, ordered by rank}. `owners` contains the slices of the
    model's tensors."""
    found = {}
    for stored, parts in sources_with(carried, owners).items():
        pieces = []
        for name, place in parts:
            pieces += [replace(one, place=place) for one in owners[name]]
        found[stored] = sorted(pieces, key=lambda one: one.rank)
    return found


def exported_config(
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    entries: Iterable[Entry],
    folder: Path,
    *,
    is_multimodal: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json for an export of these tensors, and a line for each changed field. The
    config sets one precision, under the key names of transformers 4 and 5. It declares quantisation
    only if there are fp8 tensors, multi-token prediction only if its layers are present, and custom
    code only if its files are in `folder`.

    Args:
        is_multimodal: `Carried.is_multimodal`; if False, a text model trained without its vision
            tower is exported with a text-only config.
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
    form = folder_form if is_multimodal else published_form
    return form({**config, "auto_map": code} if code else config), lines


def _groups(names: Iterable[str]) -> str:
    """Group tensor names by layer or part of a vision tower, and format them with counts, such as
    `model.layers.61 (784)`."""
    found: Counter[str] = Counter()
    for name in names:
        if name.startswith("model.layers."):
            found[".".join(name.split(".")[:3])] += 1
        else:
            found[tower_part(name) or name] += 1
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
    plain = {}  # in order, each once
    for name, entry in written.items():
        if len(entry.shape) == 2 and name not in quantised and name.endswith(".weight"):
            layer = _layer(name)
            plain[name.removesuffix(".weight") if layer in layers else layer] = True
    return list(plain)


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
