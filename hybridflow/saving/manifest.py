"""The record that makes a checkpoint whole: what it holds, of which model, and every file with its
size and hash.

`manifest.json` is the last file written into a checkpoint's folder, under its name only when it is
on the disk: a folder without one is no checkpoint. Hashes are XXH3 (128 bits): a torn, truncated or
flipped file is what they must find, not an adversary, and they keep pace with the disk where
SHA-256 would slow every save. `xxhsum -H2 FILE` prints the same digits. The manifest itself, and
the driver's part of a checkpoint, carry a hash of their own content. This module imports no torch.
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
_MOST = 1 << 62  # of any size or offset
_LARGE = 1 << 30
# an index has about 150 bytes for a rectangle
_MOST_SEALED_BYTES = 1 << 28
_MOST_INDEX_BYTES = 1 << 29
# keys of a Hugging Face config that say nothing about the weights or what is computed with them
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
    )
) | frozenset(("bos_token_id", "eos_token_id", "pad_token_id"))


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 digest (32 hex digits) of one file."""

    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    `contains` names the parts (model, optimizer, reference, rng); `backend` the training backend
    that wrote it; `layout` the parallel sizes it was taken with; `hf_config` the model's Hugging
    Face config; `training` the number of updates and the optimizer's settings then (empty without
    an optimizer); `lora` the adapters' rank, alpha and targets (empty: the model has none); `files`
    is every other file of the folder, by name.
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

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Put it into `folder`, whole and on the disk."""
        value = asdict(self) | {
            "family": self.family,
            "config_digest": config_digest(self.hf_config),
        }
        write_sealed(folder / MANIFEST, value)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the checkpoint in `folder`.

        Raises:
            CheckpointError: there is none, or it is not one of this format.
        """
        file = folder / MANIFEST
        try:
            value = read_sealed(file)
            if value["format"] != FORMAT:
                raise CheckpointError(
                    f"{file} has format {value['format']}, this version reads {FORMAT}"
                )
            files = {}
            for name, record in value.pop("files").items():
                files[plain_name(name)] = FileRecord(**record)
            _check_sizes([record.size for record in files.values()])
            known = {key: value[key] for key in cls.__dataclass_fields__ if key != "files"}
            for key, kind in _KINDS.items():
                if type(known[key]) is not kind:
                    raise ValueError(f"{key} is {str(known[key])[:80]!r}")
            return cls(**{**known, "contains": tuple(map(str, known["contains"]))}, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error}); the checkpoint is torn "
                "or not ours"
            ) from error


def structure(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a Hugging Face config that weights and computation depend on."""
    kept: dict[str, Any] = {}
    for key, value in sorted(hf_config.items()):
        if key not in _INCIDENTAL:
            kept[key] = value
    return kept


def config_digest(hf_config: Mapping[str, Any]) -> str:
    """SHA-256 of `structure`, canonical JSON: equal digests are equal models."""
    return sha256(
        json.dumps(structure(hf_config), sort_keys=True, default=str).encode()
    ).hexdigest()


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Each key in which two Hugging Face configs describe another model, as `key is X there, Y
    here`."""
    one = structure(theirs)
    two = structure(ours)
    found: list[str] = []
    for key in sorted(one.keys() | two.keys()):
        if json.dumps(one.get(key), default=str) != json.dumps(two.get(key), default=str):
            found.append(f"{key} is {one.get(key, 'absent')} there, {two.get(key, 'absent')} here")
    return found


def digest_of(file: Path) -> FileRecord:
    """Read a file once; its size and digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return FileRecord(size, hasher.hexdigest())


def problems_of(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the files (all of them, or `names`): missing, of another size, of other
    content. Empty when all is well."""
    wanted = manifest.files if names is None else names
    return problems_in(folder, {name: manifest.files[name] for name in wanted})


def problems_in(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """The same for files of the folder that are not in a manifest."""
    problems = [_problem_of(folder / name, record) for name, record in files.items()]
    return list(filter(None, problems))


def _problem_of(file: Path, expected: FileRecord) -> str:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device never end
            return f"{file} is not a regular file"
        if status.st_size != expected.size:
            return f"{file} has {status.st_size} bytes, the manifest says {expected.size}"
        if _is_hollow(file, status):
            return (
                f"{file} says that it has {status.st_size} bytes, of which there are none on the "
                "disk"
            )
        if digest_of(file).xxh3 != expected.xxh3:
            return f"{file} does not have the content the manifest describes (hash differs)"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return ""


def _is_hollow(file: Path, status: os.stat_result) -> bool:
    """Whether a large file is one hole, which no save writes, and whose zeros take hours to
    hash."""
    if status.st_size < _LARGE or status.st_blocks * 512 > status.st_size >> 10:
        return False
    with file.open("rb") as stream:
        try:
            return os.lseek(stream.fileno(), 0, os.SEEK_DATA) >= _LARGE
        except OSError:  # no data from here on
            return True


def read_index(folder: Path) -> dict[str, Any]:
    """A checkpoint's {chunks: where each rectangle lies, hf: where each HF tensor lies}.

    Raises:
        CheckpointError: it is torn, or an entry has not the form that a save writes.
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
                raise ValueError(f"no slice of a tensor: {source!r} {source_start} {shape}")
            _check_sizes(source_start, shape, start)
        return {"chunks": value["chunks"], "hf": value["hf"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); `hybridflow checkpoint verify` says more"
        ) from error


def _check_chunk(chunk: Any) -> None:
    if not all(isinstance(chunk[name], str) for name in ("key", "dtype", "file")):
        raise ValueError(f"no rectangle: {str(chunk)[:100]}")
    shape = chunk["shape"]
    start = chunk["start"]
    size = chunk["size"]
    _check_sizes(shape, start, size, (chunk["offset"], chunk["length"]))
    ends = [at + extent for at, extent in zip(start, size, strict=True)]
    if any(end > extent for end, extent in zip(ends, shape, strict=True)):
        raise ValueError(
            f"the rectangle {start}+{size} leaves its tensor {chunk['key'][:80]} {shape}"
        )


def _check_sizes(*lists: Any) -> None:
    for one in lists:
        if not isinstance(one, list | tuple) or not all(
            type(number) is int and 0 <= number < _MOST for number in one
        ):
            raise ValueError(f"no list of sizes: {str(one)[:100]}")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object that carries the hash of its own content; whole or not at all."""
    plain = json.loads(json.dumps(value))
    write_json(path, {**plain, _SEAL: _seal(plain)})


def read_sealed(file: Path) -> dict[str, Any]:
    """What `write_sealed` wrote to `file`.

    Raises:
        CheckpointError: there is no such file, or its content is not what was written.
    """
    try:
        value: dict[str, Any] = read_outside_json(file, _MOST_SEALED_BYTES, unique=True)
        seal = value.pop(_SEAL, None)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} is not a whole checkpoint (no {file.name} in it)"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}: {error}); the checkpoint is torn or "
            "not ours"
        ) from error
    if seal is None:
        raise CheckpointError(
            f"{file} has no hash of itself: it is not ours, or an earlier version wrote it"
        )
    if seal != _seal(value):
        raise CheckpointError(f"{file} does not have the content that was written (hash differs)")
    return value


def _seal(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def plain_name(name: str) -> str:
    """The name of a file or folder right inside another. ValueError for anything that leads
    elsewhere."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file inside the folder")
    return name


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all; it is on the disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    # opened before the name appears: whoever waits for the file may rename the folder at once
    with _opened(path.parent) as folder:
        os.replace(temporary, path)
        os.fsync(folder)


def say_saved(folder: Path) -> None:
    """Tell the driver, by a file beside `folder`, that every rank has its part on the disk and is
    done with it.

    That its manifest is there says less: rank 0 syncs after the rename that shows it, and may fail
    in that.
    """
    _said_by(folder).touch()


def is_said_saved(folder: Path) -> bool:
    """Whether `say_saved` was called for the folder."""
    return _said_by(folder).exists()


def _said_by(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.saved")


def sync_folder(folder: Path) -> None:
    """Bring names that were created, renamed or removed in `folder` to the disk."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A folder's descriptor, which stays valid when the folder is renamed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
