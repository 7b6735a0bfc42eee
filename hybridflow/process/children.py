"""Setup of child processes: they exit together with their parent, even if it is killed with
SIGKILL, and apply settings from their environment variables.

Engines and workers start further processes. Without this, a killed run would leave them behind,
occupying ports and memory. Linux only (`prctl(PR_SET_PDEATHSIG)`).
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STOPPED = "T"  # by SIGSTOP or a terminal; a process halted by a debugger has another state
ENDED = "Z"  # not yet reaped by its parent
_PR_SET_PDEATHSIG = 1
_KILL_WAIT_S = 5.0
# loaded here, because a library must not be loaded between a fork and an exec
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends.

    The kernel watches the *thread* that forked this process, so that thread should live as long as
    this process. The setting is not inherited by child processes, so each process has to repeat the
    call.

    Args:
        parent: the parent's pid, read before the fork; None if unknown. If the parent has already
            exited, the kernel never sends the signal, so this process exits immediately.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def state_of(pid: int) -> str:
    """Return a local process's state letter from /proc (`R` running, `S` sleeping, `T` stopped, `Z`
    zombie), or an empty string if the process does not exist.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    return state_of(pid) not in ("", ENDED)


def end_processes(pids: Sequence[int], patience_s: float = _KILL_WAIT_S) -> None:
    """Wait until the processes have exited. After `patience_s`, SIGKILL the remaining ones."""
    deadline = time.monotonic() + patience_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    for pid in left:
        if is_running(pid):
            with suppress(ProcessLookupError):  # it has exited in the meantime
                os.kill(pid, signal.SIGKILL)


def use_threads_of_environment() -> None:
    """Set torch's thread count to OMP_NUM_THREADS (default: the number of cores) if torch was
    imported before the variable was set. A later import reads the variable itself.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(
            int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        )


def print_whole_lines() -> None:
    """Make `print` write each line immediately and atomically, for a process that shares its log
    file with others or may be killed. By default, the last lines of a killed process are lost; with
    PYTHONUNBUFFERED, lines of two processes interleave.

    If the disk is full, log lines are lost, but the process continues.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with suppress(OSError):
            getattr(sys, name).flush()
        raw = io.BufferedWriter(_Log(descriptor))
        # as Python's own stderr
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)


class _Log(io.RawIOBase):
    """A descriptor that drops text if a write fails. The amount of dropped text is reported by a
    later write.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        size = len(data)
        try:
            written = os.write(self._descriptor, data)
            if self._lost:
                os.write(self._descriptor, b"(%d bytes of this log are lost)\n" % self._lost)
                self._lost = 0
        except OSError:
            self._lost += size
            return size
        return written


def main(argv: Sequence[str]) -> None:
    """Replace this process with a program that exits together with the process that started this
    one.

    `python -I children.py PID PROGRAM ARGUMENT ...` is for multi-threaded callers, which must not
    run Python code between a fork and an exec. PID is the caller's process id.
    """
    die_with_parent(int(argv[0]))
    os.execvp(argv[1], list(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
