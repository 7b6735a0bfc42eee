"""Resolution of Hugging Face hub ids (`ORG/NAME`, optionally `@REVISION`), which may be used in
place of folders or data files.

An id refers to this machine's cache, as filled by `hf download`. Nothing is downloaded, and no
setting of the library (such as HF_HUB_OFFLINE) is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig

Kind = Literal["model", "dataset"]
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = ("train", "test", "validation", "val")


def is_hub_id(text: str) -> bool:
    """Return True if the text looks like a hub id and is neither an existing path nor the name of a
    data file."""
    return (
        bool(_ID.fullmatch(text)) and not text.endswith(DATA_SUFFIXES) and not Path(text).exists()
    )


def cached(hub_id: str, kind: Kind) -> Path | None:
    """Return the folder of the cached snapshot, or None if there is no snapshot or it lacks weight
    files.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:  # optional on the login node
        return None
    repository, _, revision = hub_id.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repository, repo_type=kind, revision=revision or None, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if kind == "dataset" or _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Return True if every weight file is present. An interrupted or partial download also leaves a
    snapshot folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(read_outside_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(name)).is_file() for name in names)


def located(config: RunConfig) -> RunConfig:
    """Return the configuration with hub ids replaced by the cached folders and files. Ids that are
    not cached are kept, and `config.check` reports them."""
    for section in ("model", *ROLES):
        if section == "actor":
            continue  # its model is `model`
        config = replace(config, **{section: _of_model(getattr(config, section))})
    roles = {name: replace(own, model=_of_model(own.model)) for name, own in config.roles.items()}
    config = replace(config, roles=roles)
    data = config.data
    sft = config.sft
    pairs = config.reward_training
    return replace(
        config,
        data=replace(
            data,
            train_files=_files(data.train_files, "train"),
            val_files=_files(data.val_files, "test"),
            val_sets={name: _of_val_set(given) for name, given in data.val_sets.items()},
        ),
        sft=replace(sft, train_files=_files(sft.train_files, "train")),
        reward_training=replace(
            pairs,
            train_files=_files(pairs.train_files, "train"),
            val_files=_files(pairs.val_files, "test"),
        ),
    )


def _of_model(part: Any) -> Any:
    """Resolve the model and the tokenizer of a section."""
    for key in ("path", "tokenizer"):
        name = getattr(part, key, None)
        if name is not None and is_hub_id(name) and (folder := cached(name, "model")):
            part = replace(part, **{key: str(folder)})
    return part


def _of_val_set(given: Any) -> Any:
    """Resolve an entry of `data.val_sets`, which has not been validated yet."""
    files = given.get("files") if isinstance(given, Mapping) else None
    if not isinstance(files, (list, tuple)) or not all(isinstance(file, str) for file in files):
        return given
    return {**given, "files": list(_files(files, "test"))}


def _files(names: Sequence[str], split: str) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        repository, _, pattern = name.partition(":")
        folder = cached(repository, "dataset") if is_hub_id(repository) else None
        files = [] if folder is None else split_files(folder, split, pattern)
        found += map(str, files) if files else [name]
    return tuple(found)


def split_files(folder: Path, split: str, pattern: str = "", subset: str = "") -> list[Path]:
    """Return the sorted data files of one split of a published dataset.

    Args:
        split: `train` or `test`; `validation` is used if there is no `test`.
        pattern: a glob relative to `folder`. If empty, select the files whose path contains the
            split's name, or all files if no path contains the name of a split.
        subset: read only this folder of the dataset, such as gsm8k's `main`, if it exists.
    """
    if pattern:
        files = []
        for path in folder.glob(pattern):
            if path.suffix in DATA_SUFFIXES:
                files.append(path)
        return sorted(files)
    root = folder / subset if subset and (folder / subset).is_dir() else folder
    found = (
        path
        for path in root.rglob("*")
        if path.suffix in DATA_SUFFIXES and path.name not in _METADATA
    )
    files = sorted(path for path in found if path.is_file())
    named = {}
    for name in _SPLITS:
        named[name] = [file for file in files if name in _words(file.relative_to(root))]
    if not any(named.values()):
        return files
    return (
        named["train"] if split == "train" else named["test"] or named["validation"] or named["val"]
    )


def _words(path: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", str(path.with_suffix("")).lower()))


def missing(hub_id: str, kind: Kind) -> str:
    """Explain why a hub id is unavailable, and name the command that downloads it."""
    repository, _, revision = hub_id.partition("@")
    words = [
        "hf",
        "download",
        *(["--repo-type", "dataset"] if kind == "dataset" else []),
        repository,
    ]
    words += ["--revision", revision] if revision else []
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError:
        return (
            "not a path, and the Hugging Face cache cannot be searched because huggingface-hub is "
            f"not installed; run pip install 'hybridflow[hub]', then `{' '.join(words)}`"
        )
    return (
        f"not a path, and not complete in the Hugging Face cache {HF_HUB_CACHE}; run "
        f"`{' '.join(words)}` on a machine with internet access, with HF_HOME on a disk that all "
        "nodes can read"
    )
