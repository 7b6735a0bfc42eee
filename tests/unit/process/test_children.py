"""Processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


PRINTS = """
import os, sys
from pathlib import Path
from hybridflow.observe import spans
from hybridflow.process.children import print_whole_lines
print_whole_lines()
print("dropped")
print("dropped too", file=sys.stderr)
spans.record_to(Path("/dev/full/spans.jsonl"), "a rank")
with spans.span("a call"):
    pass
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600)
os.dup2(log, 1)
print("there is space again")
print("and more")
"""


def test_a_log_on_a_full_disk_costs_lines_and_no_process(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PRINTS, str(tmp_path / "log")],
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["there is space again", "(8 bytes of this log are lost)", "and more"]
