"""Settings that every test runs under."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from hypothesis import settings

# One thread a process: tests run several processes on few cores, where more threads cost a factor of ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HYBRIDFLOW_TRACEBACK", None)
# the processes that a test starts are one job
os.environ.setdefault("HYBRIDFLOW_JOB_SECRET", secrets.token_hex(32))

# No deadline: a busy machine is no failure. Derandomized and without a database: the same commit gives the same
# verdict.
settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
settings.load_profile("hybridflow")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's own working folder: relative paths of the recipes must not find what a developer has prepared."""
    monkeypatch.chdir(tmp_path)
