"""Child processes of tests, which end with the test process even when that one is killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hybridflow.process.children import die_with_parent


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

    `new_session` puts it in a session of its own, so that Ctrl-C in the terminal reaches only the
    driver.
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
        # one prepared C call: safe between fork and exec
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
    )
