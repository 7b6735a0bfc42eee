"""A small process that clears up a local cluster when its driver was killed. It runs as a script and imports the
standard library alone.

Ray's gcs and raylet die with the driver, but its agents linger for a minute, waiting for the dead gcs to take their
last report (ray/_private/process_watcher.py, report_raylet_error_logs). They are recognised by the file that every
process of the cluster has open in the cluster's own temporary folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_POLL_S = 0.5
_PATIENCE_S = 15.0


def driver_is_done(driver: int) -> bool:
    """Wait for the end of the driver: True when it wrote to our stdin, False when it died without."""
    while os.getppid() == driver:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable:
            return os.read(0, 1) == b"x"
    return False


def processes_in(folder: Path) -> list[int]:
    """This user's processes with an open file under `folder`, except this one and its parent."""
    found, spared = [], (os.getpid(), os.getppid())  # a guard never ends the driver that it guards
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            if entry.stat().st_uid == os.getuid() and any(_is_under(link, folder) for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or may not be read
    return found


def _is_under(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(f"{folder}/")
    except OSError:
        return False  # it has been closed


def clear_up(folder: Path) -> None:
    """Kill what is left of the cluster and remove its folder."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if not driver_is_done(int(sys.argv[2])):
        clear_up(Path(sys.argv[1]))
