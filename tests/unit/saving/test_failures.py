"""What is said about a checkpoint that could not be written."""

from __future__ import annotations

import errno
from pathlib import Path

from hybridflow.saving.failures import cause_of, not_written

FOLDER = Path("/runs/mine/checkpoints/global_step_2")


def test_the_remedy_fits_the_cause() -> None:
    full = not_written(FOLDER, cause_of(OSError(errno.ENOSPC, "No space left on device")))
    assert "Free disk space and rerun the same command" in str(full)
    missing = OSError(errno.ENOENT, "No such file or directory", str(FOLDER / "index.json"))
    message = str(not_written(FOLDER, cause_of(missing)))
    assert f"{FOLDER / 'index.json'}" in message and "another program has removed" in message
    assert "disk space" not in message and "untouched" not in message
