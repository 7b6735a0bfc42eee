"""Temporary folders that no other user of the machine can enter, rename or make first."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hybridflow.errors import ResourceError

RAY = "r"
ROOM_FOR_RAY = 67  # bytes of a socket's path below a private folder: /r, and up to 64 of Ray's own
_LONGEST_SOCKET = 107  # bytes in the path of a unix socket
_RANDOM = 8  # characters that mkdtemp appends


def compiled_code() -> str:
    """Where torch may keep code that it has compiled, and load it from: its own default is a name
    in /tmp that anybody could have made before."""
    return f"{Path.home()}/.cache/torchinductor"


def parent_of_private(name_bytes: int, room: int = 0) -> Path:
    """Where a private folder whose name has so many bytes is made: TMPDIR, or /tmp where that
    leaves less than `room` bytes for the rest of the path of a unix socket in it.

    Raises:
        ResourceError: others could replace the folder, because one above it is writable by all and
            not sticky.
    """
    parent = Path(tempfile.gettempdir()).resolve()
    if room and len(os.fsencode(parent)) + 1 + name_bytes + room > _LONGEST_SOCKET:
        parent = Path("/tmp").resolve()
    for folder in (parent, *parent.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ResourceError(
                f"{folder} is writable by every user and not sticky, so that others could replace "
                f"folders in it: set its mode to 1777, or TMPDIR to another folder than {parent}"
            )
    return parent


def make_private_folder(prefix: str, room: int = 0) -> Path:
    """A new folder of mode 0700 whose name begins with `prefix`, where `parent_of_private` says.

    Ray opens the folder that it is given as --temp-dir to everybody, though not the one around it:
    it is given `RAY` inside of this one.

    Raises:
        ResourceError: the folder cannot be made, or others could replace it.
    """
    parent = parent_of_private(len(os.fsencode(prefix)) + _RANDOM, room)
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise ResourceError(
            f"no folder can be made in {parent}: {error.strerror}; set TMPDIR to another"
        ) from error
