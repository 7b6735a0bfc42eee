"""Untrusted files, read with a size limit and from regular files only."""

from __future__ import annotations

import os
from pathlib import Path


def read_outside_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is not a regular file (a pipe or device would block or never end), is
            larger than `most_bytes`, or is still growing. The message does not name the file.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= most_bytes else b""
    if size > most_bytes or len(data) > size:
        raise ValueError(
            f"larger than {most_bytes} bytes"
            if size > most_bytes
            else "still growing while being read"
        )
    return data


def is_inside(path: Path, folder: Path) -> bool:
    """Return True if `path` is inside `folder` after resolving links. False for circular links."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False
