"""A memory limit for commands that read other users' folders."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from hybridflow.errors import MemoryExhaustedError


@contextmanager
def memory_limit() -> Iterator[None]:
    """Limit this process to half of the machine's memory.

    Raises:
        MemoryExhaustedError: the code inside the block needs more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    page = resource.getpagesize()
    with open("/proc/self/statm", encoding="ascii") as statm:
        present = int(statm.read().split()[0]) * page
    allowed = present + os.sysconf("SC_PHYS_PAGES") * page // 2
    lower = [limit for limit in (soft, hard, allowed) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(lower), hard))
    try:
        yield
    except MemoryError as error:
        raise MemoryExhaustedError(
            "out of memory: this command is limited to half of the machine's memory; some file is "
            "far larger than any that a run writes"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
