"""manifest.json of a prepared folder: the request, the row counts, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError, naming

MANIFEST = "manifest.json"
# increment when the files written for the same options change, so that older folders are rebuilt
_FORMAT = 1
_LARGE = 1 << 30


def write_manifest(folder: Path, request: Mapping[str, object], rows: Mapping[str, int]) -> None:
    """Write manifest.json into `folder`. Call this last, because the manifest lists all other
    files."""
    files = []
    for path in folder.rglob("*"):
        if path.is_file():
            files.append(str(path.relative_to(folder)))
    names = sorted(files)
    manifest = {
        "format": _FORMAT,
        "request": request,
        "rows": rows,
        "files": listed_files(folder, names),
    }
    with naming(folder / MANIFEST):
        (folder / MANIFEST).write_text(
            json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of `folder`, or None if there is no valid one. Without a manifest, it is
    unknown which files in the folder were written by a preparation."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = (
        isinstance(found, dict)
        and isinstance(found.get("rows"), dict)
        and isinstance(found.get("files"), dict)
    )
    if not complete or "request" not in found:
        return None
    # A manifest of another format keeps its file list, so that the folder may be replaced, but
    # matches no request.
    return found if found.get("format") == _FORMAT else {**found, "request": None}


def files_are_intact(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Return True if every listed file is present with its recorded hash."""
    files: dict[str, str] = manifest["files"]
    return all((folder / name).is_file() for name in files) and listed_files(folder, files) == files


def listed_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of each named file in `folder`.

    Raises:
        DataError: a file consists mostly of a sparse hole, which would take hours to hash.
    """
    hashes: dict[str, str] = {}
    for name in names:
        with (folder / name).open("rb") as stream:
            if _is_hollow(stream.fileno()):
                raise DataError(
                    f"{folder / name}: most of its {os.fstat(stream.fileno()).st_size} bytes are "
                    "not on disk; copy or download it again"
                )
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def _is_hollow(file: int) -> bool:
    """Return True if a large file has a hole and almost no blocks on disk. The block count alone is
    not enough, because some file systems do not report it."""
    status = os.fstat(file)
    if status.st_size < _LARGE or status.st_blocks * 512 > status.st_size >> 10:
        return False
    hole = os.lseek(file, 0, os.SEEK_HOLE)
    os.lseek(file, 0, os.SEEK_SET)
    return hole < status.st_size
