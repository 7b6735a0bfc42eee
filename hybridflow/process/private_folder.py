"""Temporary folders that no other user of the machine can enter, rename or make first."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

from hybridflow.errors import ResourceError

RAY = "r"
LONGEST_FOR_RAY = 40  # with /r and up to 64 characters of Ray's for a socket; the path of a unix socket holds 107
_RANDOM = 8  # characters that mkdtemp appends


def compiled_code() -> str:
    """Where torch may keep code that it has compiled, and load it from: its own default is a name in /tmp that anybody
    could have made before."""
    return f"{Path.home()}/.cache/torchinductor"


def make_private_folder(prefix: str, longest: int | None = None) -> Path:
    """A new folder of mode 0700 in TMPDIR, or in /tmp where its path would have more than `longest` characters.

    Ray opens the folder that it is given as --temp-dir to everybody, though not the one around it: it is given `RAY`
    inside of this one.

    Raises:
        ResourceError: the folder cannot be made, or others could replace it because one above it is writable by all
            and not sticky.
    """
    parent = Path(tempfile.gettempdir()).resolve()
    if longest is not None and len(str(parent)) + 1 + len(prefix) + _RANDOM > longest:
        parent = Path("/tmp").resolve()
    for folder in (parent, *parent.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ResourceError(
                f"{folder} is writable by every user and not sticky, so that others could replace folders in it: set "
                f"its mode to 1777, or TMPDIR to another folder than {parent}"
            )
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise ResourceError(f"no folder can be made in {parent}: {error.strerror}; set TMPDIR to another") from error
