"""What a new process does first: end with the process that started it, even when that one is killed
with SIGKILL, and follow its own environment.

Engines and workers start further processes; without this a killed run leaves them behind, holding
ports and memory. Linux only (`prctl(PR_SET_PDEATHSIG)`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STOPPED = "T"  # by SIGSTOP or a terminal; a debugger's halt is another state
ENDED = "Z"  # and its parent has not asked how
_PR_SET_PDEATHSIG = 1
_KILL_WAIT_S = 5.0
# loaded here, so that nothing is loaded between a fork and an exec
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends.

    The kernel watches the *thread* that forked this process, which should therefore live as long as
    this process. The request is not inherited: each generation has to make its own.

    Args:
        parent: the pid that the parent had before the fork. A parent that ended before the request
            is then noticed, and this process ends as well; the kernel says nothing about it. None
            where nobody knows the pid.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def state_of(pid: int) -> str:
    """The state of a process of this machine as in /proc: `R` runs, `S` sleeps, `T` was stopped,
    `Z` has ended; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return state_of(pid) not in ("", ENDED)


def end_processes(pids: Sequence[int], patience_s: float = _KILL_WAIT_S) -> None:
    """Wait until the processes have ended; after `patience_s` those that are left get SIGKILL."""
    deadline = time.monotonic() + patience_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    for pid in left:
        if is_running(pid):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)


def use_threads_of_environment() -> None:
    """Compute with OMP_NUM_THREADS threads (default: the number of cores) in a process that had
    loaded torch before the variable was set; a later import of torch reads it itself."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(
            int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        )


def print_whole_lines() -> None:
    """Write each printed line at once and in one piece, for a process that shares its log file with
    others or may be killed: by default what was printed last is lost with a killed process, and
    with PYTHONUNBUFFERED the parts of two processes' lines mix."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def main(argv: Sequence[str]) -> None:
    """Become another program that ends with the process that started this one.

    `python -I children.py PID PROGRAM ARGUMENT ...` serves callers with several threads, where no
    code of ours may run between a fork and an exec. PID is theirs.
    """
    die_with_parent(int(argv[0]))
    os.execvp(argv[1], list(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
