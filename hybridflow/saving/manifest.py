"""The manifest that completes a checkpoint. It describes the contents and the model, and lists
every file with its size and hash.

`manifest.json` is the last file written into a checkpoint's folder, and is renamed to its final
name only once it is on disk. A folder without one is not a checkpoint. Hashes are XXH3 (128 bits),
which `xxhsum -H2 FILE` also prints. They only need to detect torn, truncated or corrupted files,
not tampering, and they keep up with the disk, whereas SHA-256 would slow every save. The manifest
and the driver's part of a checkpoint also contain a hash of their own content. This module does not
import torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from hybridflow.config.model_config import MULTIMODAL, wrong_fields
from hybridflow.config.outside_json import read_outside_json
from hybridflow.errors import CheckpointError

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = 2
_SEAL = "xxh3"
_KINDS = {
    **dict.fromkeys(("phase", "dtype", "created", "backend"), str),
    **dict.fromkeys(("layout", "hf_config", "versions", "lora", "training"), dict),
    **{"step": int, "contains": list},
}
_BLOCK = 4 << 20
_MOST = 1 << 62  # limit of any size or offset
_LARGE = 1 << 30
# an index takes about 150 bytes per rectangle
_MOST_SEALED_BYTES = 1 << 28
_MOST_INDEX_BYTES = 1 << 29
# keys of a Hugging Face config that affect neither the weights nor the computation
_INCIDENTAL = frozenset(
    (
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "_name_or_path",
        "auto_map",
        MULTIMODAL,
    )
) | frozenset(("bos_token_id", "eos_token_id", "pad_token_id"))


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 digest (32 hex digits) of one file."""

    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        contains: the saved parts: model, heads (trained multi-token-prediction heads), optimizer,
            reference, rng.
        backend: training backend that wrote it.
        layout: parallel sizes.
        hf_config: the model's Hugging Face config.
        training: number of updates and optimizer settings; empty if there is no optimizer.
        lora: the adapters' rank, alpha and targets; empty if there are no adapters.
        files: every other file in the folder, keyed by name.
    """

    phase: str
    step: int
    contains: tuple[str, ...]
    layout: Mapping[str, int]
    dtype: str
    hf_config: Mapping[str, Any]
    versions: Mapping[str, str]
    created: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    backend: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def family(self) -> str:
        """The model's family (`model_type`)."""
        return str(self.hf_config.get("model_type"))

    def mismatches(self, hf_config: Mapping[str, Any], backend: str) -> list[str]:
        """Return the reasons why a policy with this config and training backend cannot load the
        checkpoint; an empty list if there are none."""
        if self.backend != backend:
            return [
                f"it was written by another training backend ({self.backend}); set "
                f"actor.backend={self.backend}, or export it with `hybridflow checkpoint export` "
                "and set model.path to the export"
            ]
        family = hf_config.get("model_type")
        if self.family != family:
            return [f"it is a checkpoint of family {self.family}, but the model is {family}"]
        return differences(self.hf_config, hf_config)

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(record.size for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Atomically write the manifest to `folder`, and sync it to disk."""
        value = asdict(self) | {
            "family": self.family,
            "config_digest": config_digest(self.hf_config),
        }
        write_sealed(folder / MANIFEST, value)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of the checkpoint in `folder`.

        Raises:
            CheckpointError: the manifest is missing or damaged, or has an unsupported format.
        """
        file = folder / MANIFEST
        try:
            value = read_sealed(file)
            if value["format"] != FORMAT:
                raise CheckpointError(
                    f"{file} has format {value['format']}, but this version reads {FORMAT}"
                )
            files = {}
            for name, record in value.pop("files").items():
                files[plain_name(name)] = FileRecord(**record)
            _check_sizes([record.size for record in files.values()])
            known = {key: value[key] for key in cls.__dataclass_fields__ if key != "files"}
            for key, kind in _KINDS.items():
                if type(known[key]) is not kind:
                    raise ValueError(f"{key} is {str(known[key])[:80]!r}")
            if wrong := wrong_fields(known["hf_config"]):
                raise ValueError(f"hf_config: {wrong[0]}")
            return cls(**{**known, "contains": tuple(map(str, known["contains"]))}, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error}); the checkpoint is "
                "damaged or was not written by HybridFlow"
            ) from error


def structure(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Hugging Face config that determine the weights and the computation."""
    kept: dict[str, Any] = {}
    for key, value in sorted(hf_config.items()):
        if key not in _INCIDENTAL:
            kept[key] = value
    return kept


def config_digest(hf_config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `structure` as canonical JSON. Equal digests mean equal models."""
    return sha256(
        json.dumps(structure(hf_config), sort_keys=True, default=str).encode()
    ).hexdigest()


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Compare two Hugging Face configs. Returns a line `KEY is X in the checkpoint, Y here` for
    each difference that makes them describe different models.
    """
    one = structure(theirs)
    two = structure(ours)
    found: list[str] = []
    for key in sorted(one.keys() | two.keys()):
        if json.dumps(one.get(key), default=str) != json.dumps(two.get(key), default=str):
            found.append(
                f"{key} is {one.get(key, 'absent')} in the checkpoint, {two.get(key, 'absent')} "
                "here"
            )
    return found


def digest_of(file: Path) -> FileRecord:
    """Read a file once and return its size and digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return FileRecord(size, hasher.hexdigest())


def problems_of(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Check all files, or only `names`. Returns a line for each one that is missing or has the
    wrong size or content.
    """
    wanted = manifest.files if names is None else names
    return problems_in(folder, {name: manifest.files[name] for name in wanted})


def problems_in(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Check these files. Returns a line for each one that is missing or has the wrong size or
    content.
    """
    problems = [_problem_of(folder / name, record) for name, record in files.items()]
    return list(filter(None, problems))


def _problem_of(file: Path, expected: FileRecord) -> str:
    try:
        status = file.stat()
        if not stat.S_ISREG(
            status.st_mode
        ):  # reading a pipe would block, and reading a device would never end
            return f"{file} is not a regular file"
        if status.st_size != expected.size:
            return f"{file} has {status.st_size} bytes, but the manifest lists {expected.size}"
        if _is_hollow(file, status):
            return f"{file} has a size of {status.st_size} bytes, but none of them are on disk"
        if digest_of(file).xxh3 != expected.xxh3:
            return f"{file} does not match its hash in the manifest"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return ""


def _is_hollow(file: Path, status: os.stat_result) -> bool:
    """Return True if a large file starts with a large hole. No save writes such a file, and hashing
    its zeros would take hours."""
    if status.st_size < _LARGE or status.st_blocks * 512 > status.st_size >> 10:
        return False
    with file.open("rb") as stream:
        try:
            return os.lseek(stream.fileno(), 0, os.SEEK_DATA) >= _LARGE
        except OSError:  # there is no data
            return True


def read_index(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's index. `chunks` locates each rectangle in the files, and `hf` each HF
    slice in the saved tensors.

    Raises:
        CheckpointError: the index is damaged, or an entry is malformed.
    """
    file = folder / INDEX
    try:
        value: dict[str, Any] = read_outside_json(file, _MOST_INDEX_BYTES, unique=True)
        for chunk in value["chunks"]:
            _check_chunk(chunk)
        for source, source_start, shape, key, start in value["hf"]:
            if not (
                isinstance(source, str) and isinstance(key, str) and len(source_start) == len(shape)
            ):
                raise ValueError(f"not a slice of a tensor: {source!r} {source_start} {shape}")
            _check_sizes(source_start, shape, start)
        return {"chunks": value["chunks"], "hf": value["hf"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); run `hybridflow checkpoint verify` for details"
        ) from error


def _check_chunk(chunk: Any) -> None:
    if not all(isinstance(chunk[name], str) for name in ("key", "dtype", "file")):
        raise ValueError(f"not a rectangle: {str(chunk)[:100]}")
    shape = chunk["shape"]
    start = chunk["start"]
    size = chunk["size"]
    _check_sizes(shape, start, size, (chunk["offset"], chunk["length"]))
    ends = [at + extent for at, extent in zip(start, size, strict=True)]
    if any(end > extent for end, extent in zip(ends, shape, strict=True)):
        raise ValueError(
            f"the rectangle {start}+{size} extends beyond its tensor {chunk['key'][:80]} {shape}"
        )


def _check_sizes(*lists: Any) -> None:
    for one in lists:
        if not isinstance(one, list | tuple) or not all(
            type(number) is int and 0 <= number < _MOST for number in one
        ):
            raise ValueError(f"not a list of sizes: {str(one)[:100]}")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically write a JSON object, including a hash of its own content."""
    plain = json.loads(json.dumps(value))
    write_json(path, {**plain, _SEAL: _seal(plain)})


def read_sealed(file: Path) -> dict[str, Any]:
    """Read a file written by `write_sealed`.

    Raises:
        CheckpointError: the file is missing, or its content does not match its hash.
    """
    try:
        value: dict[str, Any] = read_outside_json(file, _MOST_SEALED_BYTES, unique=True)
        seal = value.pop(_SEAL, None)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} is not a complete checkpoint (no {file.name} in it)"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}: {error}); the checkpoint is damaged "
            "or was not written by HybridFlow"
        ) from error
    if seal is None:
        raise CheckpointError(
            f"{file} has no hash of its own content; it was written by an earlier version, or not "
            "by HybridFlow"
        )
    if seal != _seal(value):
        raise CheckpointError(f"{file} does not match its own hash; it was damaged or edited")
    return value


def _seal(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def plain_name(name: str) -> str:
    """Return `name` if it is a plain file or folder name. Raises ValueError if it is any other
    path."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file inside the folder")
    return name


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. The file is synced to disk on return."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    # open the folder first, because a waiting process may rename it as soon as the file appears
    with _opened(path.parent) as folder:
        os.replace(temporary, path)
        os.fsync(folder)


def say_saved(folder: Path) -> None:
    """Create a marker file next to `folder`. It tells the driver that every rank has written and
    synced its part. The manifest's existence does not imply this, because rank 0 syncs only after
    the rename that makes the manifest visible, and the sync may fail.
    """
    _said_by(folder).touch()


def is_said_saved(folder: Path) -> bool:
    """Return True if `say_saved` has been called for the folder."""
    return _said_by(folder).exists()


def _said_by(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.saved")


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of `folder` to disk after files were created, renamed or
    removed."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a folder's descriptor, which remains valid if the folder is renamed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
