"""Checks of a folder's weights: completeness, shapes, precisions, and tensors that training leaves
unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

from hybridflow.config.model_config import MULTIMODAL, with_tower
from hybridflow.doctor.findings import Finding
from hybridflow.errors import ModelError
from hybridflow.models import Family
from hybridflow.models.fp8 import SCALE_SUFFIX
from hybridflow.models.model_folder import check_weights
from hybridflow.models.stored_names import tower_part
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.carried import carried_from

_READ = ("F32", "BF16", "F16", "F64")
_FP8 = "F8_E4M3"


def findings(folder: Path, family: Family) -> Iterator[Finding]:
    """Yield findings on files, shapes, precisions, and tensors that the family does not map. Reads
    only headers."""
    tensors = family.tensors()
    try:
        check_weights(folder, tensors)
        source = SafetensorsFolder(folder)
        forms = {name: source.form(name) for name in tensors}
    except ModelError as error:
        yield Finding("weights", "error", str(error), "complete the folder, then run this again")
        return
    wrong = []
    for name, shape in tensors.items():
        if forms[name][0] != shape:
            wrong.append(f"{name} has {forms[name][0]}, expected {shape}")
    if wrong:
        remedy = "config.json belongs to another model, or the folder mixes two models"
        yield Finding(
            "weights",
            "error",
            f"{len(wrong)} tensors have unexpected shapes, for example {wrong[0]}",
            remedy,
        )
        return
    unread = []
    for name, (_, kind) in forms.items():
        if not _is_read(source, name, kind):
            unread.append(f"{name} ({kind})")
    if unread:
        remedy = "use the model in bfloat16, or in block-wise fp8 with its scales"
        yield Finding("weights", "error", f"unsupported precision: {', '.join(unread[:3])}", remedy)
        return
    counts = Counter(kind for _, kind in forms.values())
    kinds = ", ".join(f"{count} in {kind}" for kind, count in counts.most_common())
    yield Finding(
        "weights",
        "ok",
        f"{len(tensors)} tensors in {len(set(source.files.values()))} files: {kinds}",
    )
    yield from _others(folder, family)


def _others(folder: Path, family: Family) -> Iterator[Finding]:
    """Yield findings on tensors that the family does not map."""
    carried = carried_from(folder, family)
    tower = [entry for entry in carried.entries if tower_part(entry.name)]
    if tower:
        many = sum(prod(entry.shape) for entry in tower) / 1e6
        is_kept = MULTIMODAL in with_tower(family.hf)
        use = "which are not trained" if is_kept else "used only in runs with data.image_key"
        yield Finding("vision tower", "ok", f"{many:,.1f} million parameters, {use}")
    for line in carried.lines:
        yield Finding(
            "other weights",
            "ok",
            line.replace(
                f"were copied unchanged from {folder}", "are copied unchanged to an export"
            ),
        )


def _is_read(source: SafetensorsFolder, name: str, kind: str) -> bool:
    scaled = (
        source.quantisation is not None
        and f"{source.place(name).tensor}{SCALE_SUFFIX}" in source.files
    )
    return kind in _READ or (kind == _FP8 and scaled)
