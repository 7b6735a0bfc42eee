"""Child processes that die with the process that started them, even when that one is killed with SIGKILL.

Engines and workers start further processes; without this a killed run leaves them behind, holding ports and memory.
Linux only (`prctl(PR_SET_PDEATHSIG)`). The kernel ties the signal to the *thread* that forks: start children from a
thread that lives as long as they should (the main thread). It does not reach grandchildren: each generation has to ask
for itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded between fork and exec


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent (`parent`, if given) dies; exits at once if that already
    happened."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def start_child(
    args: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """`subprocess.Popen` whose child is killed when the calling thread's process ends.

    `new_session` puts it in a session of its own, so that Ctrl-C in the terminal reaches only the driver.
    """
    parent = os.getpid()
    return subprocess.Popen(
        [str(arg) for arg in args],
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  one prepared C call: safe between fork and exec
    )
