"""Messages about checkpoints that could not be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hybridflow.errors import CheckpointError

_MISSING = os.strerror(errno.ENOENT)


def cause_of(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, OSError):
        return (
            f"{error.strerror}: {error.filename}"
            if error.filename
            else str(error.strerror or error)
        )
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def not_written(folder: Path, cause: str) -> CheckpointError:
    """Return the error to raise if saving to `folder` failed. `cause` is the result of
    `cause_of`."""
    rest = "the previous checkpoint is untouched. Free disk space and rerun"
    if _MISSING in cause:
        rest = "another program has removed a part of it. Rerun"
    said = f"the checkpoint {folder} could not be written ({cause}); {rest}"
    return CheckpointError(f"{said} the same command to resume.")
