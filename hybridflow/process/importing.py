"""Faster imports of large packages: without garbage collection, and without compilers that are not
used."""

from __future__ import annotations

import gc
import os
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


def without_compiler() -> dict[str, str]:
    """Return the environment variables that disable torch.compile, for machines without CUDA. There
    it needs a C++ toolchain and minutes of warm-up. TORCH_COMPILE_DISABLE=0 in the environment
    leaves it enabled.

    The second variable makes torch.compile return its function unchanged. With the first alone,
    decorating a function still imports torch's inductor. That takes a fifth of the time of SGLang's
    imports, and a tenth of Megatron's.
    """
    value = os.environ.get("TORCH_COMPILE_DISABLE", "1")
    return {
        "TORCH_COMPILE_DISABLE": value,
        "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", value),
    }
