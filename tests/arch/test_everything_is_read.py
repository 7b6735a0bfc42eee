"""pytest and ruff leave out folders called `dist` by default; ours holds the tests with several
processes."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_pytest_goes_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert {"dist", "unit", "e2e", "arch"} <= names
    assert not [
        (name, pattern)
        for name in names
        for pattern in pytestconfig.getini("norecursedirs")
        if fnmatch(name, pattern)
    ]


def test_ruff_reads_every_python_file() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    read = {
        Path(line).relative_to(ROOT) for line in found.stdout.splitlines() if line.endswith(".py")
    }
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {Path(name) for name in tracked} - read
