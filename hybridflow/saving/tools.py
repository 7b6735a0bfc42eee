"""Implementation of `hybridflow checkpoint`: inspects, verifies and exports checkpoints, and
imports Hugging Face folders. Runs in one process without a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.model_config import MULTIMODAL, read_model_config
from hybridflow.config.outside_text import read_outside_bytes
from hybridflow.config.outside_yaml import read_outside_yaml
from hybridflow.errors import CheckpointError, ConfigError, ModelError
from hybridflow.saving.manifest import (
    MANIFEST,
    Manifest,
    config_digest,
    plain_name,
    problems_of,
    read_index,
    sync_folder,
    write_json,
)
from hybridflow.saving.model_card import write_card
from hybridflow.saving.store import (
    DRIVER,
    LATEST,
    is_name_of_checkpoint,
    latest_name,
    left_out,
    problems_of_parts,
)

if TYPE_CHECKING:
    import torch

    from hybridflow.models.stored_names import Place
    from hybridflow.models.weights import WeightSource
    from hybridflow.saving.reader import CheckpointFolder
    from hybridflow.saving.safetensors_file import Entry

_MOST_LIST_BYTES = 16 << 20


def locate(path: Path) -> Path:
    """Find the role folder (the one with the manifest) for `path`. The path may be that folder, a
    checkpoint, a run, or a run's `checkpoints/` or `checkpoints/latest`. For a run, the latest
    checkpoint is used.

    Raises:
        ConfigError: there is no such folder. The message lists the names that were tried.
    """
    if path.name == "latest" and (path.parent / LATEST).is_file():
        path = path.parent
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; pass a run, a checkpoint "
            "(runs/NAME/checkpoints/global_step_N) or its policy folder"
        )
    for folder in (path / "checkpoints", path):
        try:
            name = latest_name(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / LATEST} is damaged ({error}); pass a checkpoint in that folder"
            ) from error
        if name:
            return locate(folder / name)
    for folder in (path, path / "policy"):
        if (folder / MANIFEST).exists():
            return folder
    if path.name == "policy" or (path / "policy").is_dir() or (path / DRIVER).exists():
        raise CheckpointError(
            f"{path} is not a complete checkpoint: no {MANIFEST} in it (the save was interrupted, "
            "or it was written by an older version)"
        )
    raise ConfigError(
        f"{path} contains no checkpoint: no {MANIFEST}, policy/ or checkpoints/latest.json found"
    )


def roles(path: Path) -> list[Path]:
    """Return the folders of all roles (policy, critic) of the checkpoint at `path`, or only the
    given role's folder."""
    folder = locate(path)
    if folder.resolve() == path.resolve():
        return [folder]
    return [
        folder,
        *(
            file.parent
            for file in sorted(folder.parent.glob(f"*/{MANIFEST}"))
            if file.parent != folder
        ),
    ]


def incomplete_checkpoints(path: Path) -> list[str]:
    """If `path` is a run or a run's `checkpoints/`, return a line for each incomplete checkpoint in
    it.
    """
    lines: list[str] = []
    for folder in (path / "checkpoints", path):
        lines.extend(left_out(folder))
    return lines


# ---- inspect and verify


def inspect(folder: Path) -> dict[str, Any]:
    """Summarise a checkpoint: the manifest's values, and the number of tensors and bytes in each
    part."""
    manifest = Manifest.read(folder)
    parts: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    for chunk in read_index(folder)["chunks"]:
        figures = parts.setdefault(_part(chunk["key"]), {"tensors": 0, "rectangles": 0, "bytes": 0})
        figures["tensors"] += chunk["key"] not in seen
        figures["rectangles"] += 1
        figures["bytes"] += chunk["length"]
        seen.add(chunk["key"])
    return {
        "folder": str(folder),
        "phase": manifest.phase,
        "step": manifest.step,
        "created": manifest.created,
        "family": manifest.family,
        "dtype": manifest.dtype,
        "config_digest": config_digest(manifest.hf_config),
        "layout": dict(manifest.layout),
        "contains": list(manifest.contains),
        "lora": dict(manifest.lora),
        "versions": dict(manifest.versions),
        "files": len(manifest.files),
        "bytes": manifest.size,
        "parts": parts,
    }


def _part(key: str) -> str:
    if key.startswith("optimizer.state."):
        return "optimizer " + key.split(".")[2]
    if key.startswith("reference."):
        return "reference"
    if key == "rng_state":
        return "random state"
    return "adapters" if ".lora_" in key else "model"


def table(figures: Mapping[str, Any]) -> str:
    """Format the result of `inspect` for the terminal."""
    layout = " ".join(f"{name}={size}" for name, size in figures["layout"].items())
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    rows = [
        ("checkpoint", figures["folder"]),
        ("step", f"{figures['step']} ({figures['phase'] or 'no phase'}), {figures['created']}"),
        (
            "model",
            f"{figures['family']}, {figures['dtype']}, config {figures['config_digest'][:16]}",
        ),
        ("written by", f"{layout}; {versions}"),
        ("files", f"{figures['files']}, {_mib(figures['bytes'])}"),
    ]
    for part, numbers in figures["parts"].items():
        tensors = f"{numbers['tensors']} tensors in {numbers['rectangles']} rectangles"
        rows.append((part, f"{tensors}, {_mib(numbers['bytes'])}"))
    return "\n".join(f"{name:<22}{text}" for name, text in rows)


def verify(folder: Path, whole: bool = False) -> tuple[Manifest, list[str]]:
    """Reread every file. Returns the manifest and a list of problems.

    Args:
        whole: if True, require the rest of the checkpoint even if nothing else indicates that the
            folder is part of one.
    """
    manifest = Manifest.read(folder)
    found = _all_problems(folder, manifest)
    found += [
        f"{path} is not part of the checkpoint"
        for path in sorted(folder.iterdir())
        if path.name not in (MANIFEST, *manifest.files)
    ]
    if whole or (folder.parent / DRIVER).exists() or is_name_of_checkpoint(folder.parent.name):
        found += problems_of_parts(folder.parent)
    return manifest, found


def _all_problems(folder: Path, manifest: Manifest) -> list[str]:
    # hashing releases the GIL
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: problems_of(folder, manifest, [name]), manifest.files)
        lines: list[str] = []
        for problems in found:
            lines.extend(problems)
        return lines


def _wrong_checksums(folder: Path) -> list[str]:
    """Return the files that do not match the folder's checksums.sha256, or an empty list if the
    folder has no such file.
    """
    listed = folder / "checksums.sha256"
    found = []
    if not listed.exists():
        return []
    try:
        lines = read_outside_bytes(listed, _MOST_LIST_BYTES).decode("utf-8").splitlines()
    except ValueError as error:  # includes UnicodeDecodeError
        return [f"{listed} cannot be read: {error}"]
    for line in filter(str.strip, lines):
        try:
            digest, name = line.split(maxsplit=1)
            file = folder / plain_name(name.lstrip("*"))
            if file.exists() and not file.is_file():
                raise ValueError("not a regular file")
            with file.open("rb") as stream:
                if file_digest(stream, "sha256").hexdigest() != digest:
                    found.append(f"{file} does not match its checksum in {listed.name}")
        except (OSError, ValueError) as error:
            found.append(f"{listed}, {line[:200]!r}: could not verify it: {error}")
    return found


# ---- Hugging Face


@dataclass(frozen=True)
class Written:
    """The result of `export` and `import_`."""

    folder: Path
    tensors: int
    files: int
    size: int
    lines: tuple[str, ...] = ()


def export(
    folder: Path,
    out: Path,
    dtype: str | None,
    max_shard_bytes: int,
    tokenizer: Path | None,
    published: Path | None = None,
    *,
    alone: bool = False,
) -> Written:
    """Export a checkpoint's model to a Hugging Face folder. At most one tensor and its source
    rectangles are in memory at a time.

    Args:
        tokenizer: folder from which to copy tokenizer files; None for the run's.
        published: the model's original folder, from which weights that training does not use are
            copied; None for the run's `model.path`.
        alone: True to copy no such weights, so that the folder contains only the text model.

    Raises:
        CheckpointError: a file of the checkpoint does not match the manifest.
    """
    source = _verified(folder)
    # a run keeps a copy of its tokenizer next to the config from which its engines start
    if tokenizer is None:
        tokenizer = next(filter(Path.is_dir, _above(folder, "model")), None)
    if alone:
        published = None
    elif published is None:
        published = _published_folder(folder)
    hf_config = source.manifest.hf_config
    precision = dtype or source.manifest.dtype
    with_heads = "heads" in source.manifest.contains
    return _write(
        source, hf_config, out, precision, max_shard_bytes, tokenizer, published, with_heads
    )


def add_card(folder: Path, out: Path) -> None:
    """Add a model card to the export `out` of the checkpoint in `folder`, if the checkpoint is in a
    run folder.
    """
    file = next(filter(Path.exists, _above(folder, "config.yaml")), None)
    if file is not None:
        manifest = Manifest.read(folder)
        write_card(out, file.parent, manifest.step if manifest.phase == "rl" else -1)


def _above(folder: Path, name: str) -> list[Path]:
    """Return the paths with this name in the three parent folders of a checkpoint, nearest
    first."""
    return [parent / name for parent in folder.resolve().parents[:3]]


def _published_folder(folder: Path) -> Path | None:
    """Return `model.path` of the run that contains a checkpoint. Raises CheckpointError if its
    config.yaml cannot be read."""
    file = next(filter(Path.exists, _above(folder, "config.yaml")), None)
    if file is None:
        return None
    try:
        _, config = read_outside_yaml(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; pass --published DIR") from error
    model = config.get("model")
    found = model.get("path") if isinstance(model, dict) else None
    return Path(found) if isinstance(found, str) else None


def export_adapter(folder: Path, out: Path, dtype: str | None) -> Written:
    """Write only a checkpoint's adapters, in PEFT's format: adapter_model.safetensors and
    adapter_config.json. The adapter of a text model that was trained next to a vision tower belongs
    to the model of the whole folder.

    Raises:
        ConfigError: the checkpoint has no adapters.
        CheckpointError: a file of the checkpoint does not match the manifest.
    """
    from safetensors.torch import save_file

    from hybridflow.models import family_of
    from hybridflow.models.lora import module_of, peft_config
    from hybridflow.models.stored_names import multimodal_name

    source = _verified(folder)
    is_multimodal = MULTIMODAL in source.manifest.hf_config
    shapes = source.factors()
    if not shapes:
        raise ConfigError(
            f"{folder} has no adapters (its run had actor.lora.rank=0); omit --adapter to export "
            "the whole model"
        )
    precision = _precision(dtype or source.manifest.dtype)
    tensors = {}
    modules = set()
    for name, shape in shapes.items():
        theirs = multimodal_name(name) if is_multimodal else name
        modules.add(module_of(theirs))
        tensors[f"base_model.model.{theirs}"] = (
            source.read(name, (0, 0), shape).to(precision).contiguous()
        )
    config = peft_config(
        source.manifest.lora,
        modules,
        family_of(source.manifest.hf_config).tensors(),
        in_full=is_multimodal,  # modules of the tower have the same last names
    )
    with _whole_or_nothing(out) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(partial / "adapter_config.json", config)
    return Written(out, len(tensors), 1, sum(tensor.nbytes for tensor in tensors.values()))


def _verified(folder: Path) -> CheckpointFolder:
    """Verify every file of the checkpoint in `folder`, then open it."""
    from hybridflow.saving.reader import CheckpointFolder

    manifest = Manifest.read(folder)
    if problems := _all_problems(folder, manifest):
        raise CheckpointError(f"could not export {folder}: {'; '.join(problems[:6])}")
    return CheckpointFolder(folder)


def import_(
    folder: Path, out: Path, dtype: str | None, max_shard_bytes: int, *, alone: bool = False
) -> Written:
    """Check a Hugging Face folder against its family's map, and write a copy that can be used as
    `model.path`.

    The new folder contains every tensor that training needs, in one precision, with checksums.
    Other tensors are copied unchanged and reported. With `alone`, they are omitted, so that the
    folder contains only the text model.

    Raises:
        ModelError: a tensor is missing, or a file does not match the folder's checksums.sha256 (if
            there is one).
    """
    from hybridflow.models import family_of
    from hybridflow.models.model_folder import check_weights
    from hybridflow.models.weights import SafetensorsFolder

    file = folder / "config.json"
    try:
        hf_config = read_model_config(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not a Hugging Face folder: {file} not found") from error
    except ValueError as error:
        raise ConfigError(f"{file} is {error}") from error
    if problems := _wrong_checksums(folder):
        raise ModelError(f"could not import {folder}: {'; '.join(problems[:6])}")
    check_weights(folder, family_of(hf_config).tensors())
    source = SafetensorsFolder(folder)
    chosen = dtype or str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
    published = None if alone else folder
    return _write(source, hf_config, out, chosen, max_shard_bytes, folder, published)


def _write(
    source: Any,
    hf_config: Mapping[str, Any],
    out: Path,
    dtype: str,
    max_shard_bytes: int,
    tokenizer: Path | None,
    published: Path | None,
    with_heads: bool = False,
) -> Written:
    from hybridflow.models import family_of
    from hybridflow.models.weights import copy_companions
    from hybridflow.saving.carried import (
        carried_from,
        entries_with,
        exported_config,
        sources_with,
    )
    from hybridflow.saving.safetensors_file import (
        ShardWriter,
        entries_of,
        shards_of,
        write_surroundings,
    )

    precision = _precision(dtype)
    family = family_of(hf_config, mtp=with_heads)
    carried = carried_from(published, family)
    sources = sources_with(carried, family.tensors())
    entries = entries_with(carried, entries_of(family, precision))
    files = shards_of(entries, max_shard_bytes)
    checksums = {}
    with _whole_or_nothing(out) as partial:
        for name, own in files.items():
            writer = ShardWriter(partial / name, own)
            for entry in own:
                parts = sources.get(entry.name)
                whole = _trained(entry, source, parts) if parts else carried.read(entry.name)
                writer.add(entry.name, whole)
            checksums[name] = writer.close()
        if tokenizer is not None:
            copy_companions(tokenizer, partial)
        config, changed = exported_config(
            hf_config, precision, entries, partial, is_multimodal=carried.is_multimodal
        )
        write_surroundings(partial, files, checksums, config)
    size = sum(entry.size for entry in entries)
    return Written(out, len(entries), len(files), size, (*carried.lines, *changed))


def _trained(
    entry: Entry, source: WeightSource, parts: Sequence[tuple[str, Place]]
) -> torch.Tensor:
    """Read an exported tensor, assembled from the model's tensors `parts`."""
    import torch

    [(name, place), *others] = parts
    if place.expert is None and not others:
        return source.read(name, (0,) * len(entry.shape), entry.shape)
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for name, place in parts:
        shape = place.shape(entry.shape)
        start = (0,) * len(shape)
        place.view(whole, start, shape).copy_(source.read(name, start, shape))
    return whole


def _precision(dtype: str) -> torch.dtype:
    import torch

    precision = getattr(torch, dtype, None)
    if not isinstance(precision, torch.dtype):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return precision


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `out` if the block succeeds. Raises ConfigError
    if `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another folder, or remove it")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        os.replace(partial, out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"could not write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
