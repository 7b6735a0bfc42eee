"""Processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

ASKS = """
import os, sys
from hybridflow.process.children import die_with_parent
die_with_parent({"nobody": None, "parent": os.getppid(), "another": int(sys.argv[2])}[sys.argv[1]])
print("runs")
"""


def _asked(known: str, another: int = 0) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", ASKS, known, str(another)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_a_parent_that_ended_before_the_request_is_noticed() -> None:
    """The kernel sends its signal only for a parent that ends after the request."""
    assert _asked("parent") == _asked("nobody") == (0, "runs\n")
    assert _asked("another", another=os.getppid()) == (-signal.SIGKILL, "")
