"""Check before startup that the weights of a Hugging Face folder are complete.

Reads only the file headers and does not need torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hybridflow.config.outside_json import parse_outside_json, read_outside_json
from hybridflow.errors import ModelError
from hybridflow.models.mxfp4 import packed_names
from hybridflow.models.stored_names import place_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_POINTER = b"version https://git-lfs"
_MOST_HEADER_BYTES = 16 << 20  # a header has about 130 bytes per tensor
_MOST_FILES = 100_000
_LONGEST_NAME = 255  # bytes; limit of the file systems of Linux


def check_weights(folder: Path, tensors: Collection[str] = ()) -> None:
    """Read the index and the header of every file, and check that all weights are present.

    Args:
        folder: the Hugging Face folder.
        tensors: names of the tensors that the model requires.

    Raises:
        ModelError: a file is missing, truncated or a git-lfs pointer, or a tensor is missing. The
            message contains the command that completes the folder.
    """
    held, files = _listed(folder)
    if missing := [name for name in files if not (folder / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{folder / missing[0]}{more}: listed in {INDEX}, but not found; {_again(folder)}"
        )
    for name in files:
        present = _names_in(folder / name)
        if absent := held.get(name, set()) - present:
            raise ModelError(
                f"{folder / name} does not contain the tensor {min(absent)}, which {INDEX} assigns "
                f"to it; {_again(folder)}"
            )
        held[name] = present if name == SINGLE else held[name]
    known = set().union(*held.values())
    known |= packed_names(known)
    if absent := {name for name in tensors if place_of(name, known) is None}:
        where = folder / (INDEX if (folder / INDEX).exists() else SINGLE)
        raise ModelError(
            f"{where} lacks {len(absent)} of the {len(set(tensors))} tensors that config.json "
            f"implies, for example {min(absent)}; if config.json belongs to the same model, "
            f"{_again(folder)}"
        )


def _listed(folder: Path) -> tuple[dict[str, set[str]], list[str]]:
    """Return ({file: tensors that the index assigns to it}, the file names)."""
    index = folder / INDEX
    if index.is_file():
        if _is_pointer(index):
            raise ModelError(
                f"{index} is a git-lfs pointer, not the index itself; "
                f"{_again(folder, pointer=True)}"
            )
        held: dict[str, set[str]] = {}
        for name, file in read_weight_map(index).items():
            held.setdefault(file, set()).add(name)
        return held, sorted(held)
    if (folder / SINGLE).is_file():
        return {}, [SINGLE]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    weights = []
    for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf"):
        for path in folder.glob(pattern):
            weights.append(path.name)
    other = sorted(weights)
    if shards:
        raise ModelError(
            f"{index} not found, although there are {len(shards)} weight files; {_again(folder)}"
        )
    found = f"; {other[0]} is in another format, but only safetensors is supported" if other else ""
    raise ModelError(f"{folder} contains neither {SINGLE} nor {INDEX}{found}; {_again(folder)}")


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file} of an index.

    File names must be plain names, so that an untrusted folder cannot refer to files outside of it.

    Raises:
        ModelError: the index cannot be read, or refers to a file outside of its folder.
    """
    try:
        found = read_outside_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{index} is not a valid weight index ({error}); {_again(index.parent)}"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(
            f"{index} is not a valid weight index (missing weight_map); {_again(index.parent)}"
        )
    files = set[str]()
    for name, file in found.items():
        if not isinstance(file, str) or (file not in files and not _is_plain(file)):
            raise ModelError(
                f"{index}: tensor {name[:80]} is assigned to {repr(file)[:80]}, which is not a "
                "file in this folder"
            )
        files.add(file)
        if len(files) > _MOST_FILES:
            raise ModelError(f"{index} lists more than {_MOST_FILES} files")
    return found


def _is_plain(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and not {"/", "\0"} & set(name)
        and len(name.encode(errors="replace")) <= _LONGEST_NAME
    )


def _names_in(file: Path) -> set[str]:
    """Return the tensor names of a safetensors file after checking that the file is not
    truncated."""
    if _is_pointer(file):
        raise ModelError(
            f"{file} is a git-lfs pointer, not a weight file; {_again(file.parent, pointer=True)}"
        )
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        data = stream.read(min(length, _MOST_HEADER_BYTES))
    try:
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"the header has {length} bytes")
        header = parse_outside_json(data)
        names = {name for name in header if name != "__metadata__"}
        end = max((int(header[name]["data_offsets"][1]) for name in names), default=0)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ModelError(
            f"{file} is not a complete safetensors file; {_again(file.parent)}"
        ) from error
    if size != 8 + length + end:
        raise ModelError(
            f"{file} is not a complete safetensors file: it has {size} bytes, but its header "
            f"requires {8 + length + end}; {_again(file.parent)}"
        )
    return names


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def _again(folder: Path, *, pointer: bool = False) -> str:
    """Return the download command that an error message suggests.

    Running the command again resumes an interrupted download.
    """
    rest = len(list(folder.glob(".cache/huggingface/download/**/*.incomplete")))
    was = f"  (the last download was interrupted: {rest} .incomplete files remain)" if rest else ""
    pull = f"run `git lfs pull` in {folder}, or" if pointer else "run"
    return f"{pull} `hf download ORG/NAME --local-dir {folder}` with the model's name{was}"
