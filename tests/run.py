"""Runs the tests in two parts and closes with one summary line of both, as pytest writes it.

`python tests/run.py [--check] [pytest's arguments]`: first tests/arch and tests/unit on all cores
(`-n auto`, see tests/conftest.py), then tests/dist, tests/e2e, tests/faults, tests/security and
tests/walks, which start several processes themselves, two or three files at a time, and
tests/slurm, left out where no Slurm is installed: the closing line says so. `--check` runs lint, types, the
advisories on locked packages and the strict build of the site before; a check that fails counts as an error of the summary.
Arguments that name files or folders run alone, in one part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PARALLEL = ("tests/arch", "tests/unit")
WHOLE_RUNS = ("tests/e2e", "tests/dist", "tests/faults", "tests/security", "tests/walks")
MEMORY_GIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
# files of whole runs: each waits for a quarter of its time; most take 2 GiB, and few up to 8
AT_A_TIME = 3 if MEMORY_GIB > 20 else 2
# in the order of the collection (tests/conftest.py)
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "2")
SLURM = "tests/slurm"
SLURMCTLD = "slurmctld"
CHECKS = (
    "ruff check .",
    "ruff format --check .",
    "mypy hybridflow",
    "requirements.advisories",
    "website check",
)
NOTHING_SELECTED = 5  # pytest's exit status
Outcome = tuple[int, Counter[str], list[str]]  # exit status, counts, what failed


def part(words: Sequence[str]) -> Outcome:
    """Run pytest once. A part that ends without a report (a crash, a usage error) counts as an
    error."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-tests-") as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *words], cwd=ROOT, check=False
        ).returncode
        if not report.exists():
            return (
                status or 1,
                Counter(error=1),
                [f"ERROR pytest {' '.join(words)} ended without a report"],
            )
        counts, failed = read_report(report)
    if status not in (0, NOTHING_SELECTED) and not failed:
        return (
            status,
            counts + Counter(error=1),
            [f"ERROR pytest {' '.join(words)} ended with status {status}"],
        )
    return status, counts, failed


def read_report(report: Path) -> tuple[Counter[str], list[str]]:
    """Outcomes of a JUnit report by pytest's words, and a line for each test that failed."""
    counts: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        if "failure" in kinds:
            counts["failed"] += 1
            failed.append(f"FAILED {name}")
        elif "skipped" in kinds:
            counts["skipped"] += 1
        elif "error" not in kinds:
            counts["passed"] += 1
        if "error" in kinds:  # of the set-up, or of the tear-down after a pass
            counts["error"] += 1
            failed.append(f"ERROR {name}")
    return counts, failed


def check(command: str) -> Outcome:
    """Run a tool that is no test."""
    print(f"--- {command}", flush=True)
    status = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, check=False
    ).returncode
    return (status, Counter(error=1), [f"ERROR {command}"]) if status else (0, Counter(), [])


def closing_line(counts: Counter[str], seconds: float) -> str:
    """`3 failed, 12 passed, 1 error in 4.56s`, in pytest's order."""
    words = [f"{counts[word]} {word}" for word in ("failed", "passed", "skipped") if counts[word]]
    if counts["error"]:
        words.append(f"{counts['error']} error{'s' * (counts['error'] > 1)}")
    return f"{', '.join(words) or 'no tests ran'} in {seconds:.2f}s"


def has_slurm() -> bool:
    """Whether the daemons that tests/slurm starts are installed; requirements/slurm.sh installs
    them."""
    return shutil.which(SLURMCTLD, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def main(words: Sequence[str]) -> int:
    """The exit status of the whole: 0 only if every part and every check passed."""
    started = time.monotonic()
    outcomes = [check(command) for command in CHECKS] if "--check" in words else []
    rest = [word for word in words if word != "--check"]
    left_out = ""
    if any((ROOT / word.split("::")[0]).exists() for word in rest if not word.startswith("-")):
        parts = [part(rest)]
    else:
        whole_runs = [SLURM, *WHOLE_RUNS] if has_slurm() else WHOLE_RUNS
        left_out = (
            "" if has_slurm() else f"; {SLURM} left out, Slurm is not installed (make setup-slurm)"
        )
        parts = [
            part([*PARALLEL, "-n", "auto", *BY_FILE, *rest]),
            part([*whole_runs, "-n", str(AT_A_TIME), *BY_FILE, *rest]),
        ]
    outcomes += parts
    statuses = [status for status, _, _ in outcomes]
    # one part may hold none of what -k selects
    if any(status != NOTHING_SELECTED for status, _, _ in parts):
        statuses = [0 if status == NOTHING_SELECTED else status for status in statuses]
    counts = sum((counts for _, counts, _ in outcomes), Counter[str]())
    print("=" * 40, *(line for _, _, failed in outcomes for line in failed), sep="\n")
    print(closing_line(counts, time.monotonic() - started) + left_out)
    return max(abs(status) for status in statuses)  # a signal's status is negative


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
