"""A small watchdog process that cleans up a local cluster after its driver was killed.

It runs as a script and imports only the standard library.

Ray's gcs and raylet exit with the driver, but its agents linger for a minute, trying to send a last
report to the dead gcs (ray/_private/process_watcher.py, report_raylet_error_logs). The guard
identifies them by their open files in the cluster's private temporary folder, where every process
of the cluster has one.
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
    """Wait until the driver exits. Returns True if it wrote to this process's stdin before exiting,
    and False if it died without doing so.
    """
    while os.getppid() == driver:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable:
            return os.read(0, 1) == b"x"
    return False


def processes_in(folder: Path) -> list[int]:
    """Return this user's processes with an open file under `folder`, excluding this process and its
    parent."""
    # never kill the driver being guarded
    found = []
    spared = (os.getpid(), os.getppid())
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            if entry.stat().st_uid == os.getuid() and any(
                _is_under(link, folder) for link in (entry / "fd").iterdir()
            ):
                found.append(int(entry.name))
        except OSError:
            continue  # it has exited or access is denied
    return found


def _is_under(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(f"{folder}/")
    except OSError:
        return False  # closed in the meantime


def clear_up(folder: Path) -> None:
    """Kill the cluster's remaining processes and remove its folder."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # already exited
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if not driver_is_done(int(sys.argv[2])):
        clear_up(Path(sys.argv[1]))
