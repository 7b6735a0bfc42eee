"""Conditions that hold for every side of a comparison. Import this first: it may start the script again with another
environment."""

from __future__ import annotations

import os
import sys

from hybridflow.bench.run import CONDITIONS as REQUIRED


def ensure() -> None:
    """Run the script under `REQUIRED`; the libraries read it when they are loaded."""
    if any(os.environ.get(name) != value for name, value in REQUIRED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **REQUIRED})
