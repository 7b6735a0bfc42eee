"""Conditions that hold for every side of a comparison. Import this first: it may start the script again with another
environment."""

from __future__ import annotations

import os
import sys

# One thread, and torch's allocator on huge pages as numpy's is: otherwise the allocator decides, not the code.
REQUIRED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ensure() -> None:
    """Run the script under `REQUIRED`; the libraries read it when they are loaded."""
    if any(os.environ.get(name) != value for name, value in REQUIRED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **REQUIRED})
