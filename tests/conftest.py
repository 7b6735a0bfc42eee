"""Settings that every test runs under."""

from __future__ import annotations

import os

from hypothesis import settings

# One thread a process: tests run several processes on few cores, where more threads cost a factor of ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HYBRIDFLOW_TRACEBACK", None)

# No deadline: a busy machine is no failure. Derandomized and without a database: the same commit gives the same
# verdict.
settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
settings.load_profile("hybridflow")
