"""Temporary folders that other users of the machine cannot enter, rename or pre-create."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridflow.errors import ResourceError

RAY = "r"
ROOM_FOR_RAY = 67  # bytes of a socket's path below a private folder: /r, and up to 64 of Ray's own
_LONGEST_SOCKET = 107  # bytes in the path of a unix socket
_RANDOM = 8  # characters that mkdtemp appends


def compiled_code() -> str:
    """Return the folder in which torch may cache compiled code. Torch's default is a predictable
    path in /tmp, which another user could have created first.
    """
    return f"{Path.home()}/.cache/torchinductor"


def parent_of_private(name_bytes: int, room: int = 0) -> Path:
    """Return the parent for a private folder whose name is `name_bytes` bytes long: TMPDIR, or /tmp
    if TMPDIR leaves less than `room` bytes for the rest of a unix socket's path.

    Raises:
        ResourceError: others could replace the folder, because one of its parents is writable by
            all and not sticky.
    """
    parent = Path(tempfile.gettempdir()).resolve()
    if room and len(os.fsencode(parent)) + 1 + name_bytes + room > _LONGEST_SOCKET:
        parent = Path("/tmp").resolve()
    for folder in (parent, *parent.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ResourceError(
                f"{folder} is writable by every user and not sticky, so others could replace "
                f"folders in it; set its mode to 1777, or TMPDIR to a folder other than {parent}"
            )
    return parent


def make_private_folder(prefix: str, room: int = 0) -> Path:
    """Create a folder of mode 0700 whose name begins with `prefix`, in `parent_of_private`.

    Ray makes its --temp-dir accessible to all users, but not the parent folder. Pass `RAY` inside
    this folder as Ray's --temp-dir.

    Raises:
        ResourceError: the folder cannot be created, or others could replace it.
    """
    parent = parent_of_private(len(os.fsencode(prefix)) + _RANDOM, room)
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise ResourceError(
            f"could not create a folder in {parent}: {error.strerror}; set TMPDIR to another folder"
        ) from error


@contextmanager
def temporary_private_folder(prefix: str) -> Iterator[Path]:
    """Yield a private folder that is removed at the end of the block. First removes folders with
    this prefix that were left behind by this user's killed processes.

    Raises:
        ResourceError: as for `make_private_folder`.
    """
    unlocked = make_private_folder(f".{prefix}")
    # a process that is killed loses its lock
    descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        folder = unlocked.rename(unlocked.with_name(unlocked.name[1:]))
        for other in folder.parent.glob(f"{prefix}*"):
            if other != folder:
                _remove_unless_locked(other)
        yield folder
    finally:
        os.close(descriptor)
        for path in (unlocked, unlocked.with_name(unlocked.name[1:])):
            shutil.rmtree(path, ignore_errors=True)


def _remove_unless_locked(folder: Path) -> None:
    with suppress(OSError):  # another user's, not a folder, in use, or already removed
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
