"""Importing without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Context manager that disables the cyclic garbage collector in the block, which imports large
    packages. While their classes and functions are created, the collector would scan all of them
    repeatedly. This is a quarter of the time that it takes to import torch, Megatron or SGLang, and
    frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
