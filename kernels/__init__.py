"""Memory-bound operations, each with a Triton kernel for GPUs and a torch implementation for CPUs
in one file.

Callers use an operation's function, which runs the kernel if `uses_triton` returns True. With a
torch build without CUDA, Triton is not even imported unless the environment variable
TRITON_INTERPRET is set: 1 runs the kernels in Triton's interpreter on the CPU (as the tests do); 0
only makes it possible to compile them without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = torch.version.cuda is not None or "TRITON_INTERPRET" in os.environ
LARGEST = 2**31 - 1


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return True if operations on this tensor use Triton. The decision is made only here."""
    return TRITON and (tensor.is_cuda or INTERPRETED) and not _only_torch


_only_torch = False


@contextmanager
def only_torch() -> Iterator[None]:
    """Make every operation use its torch implementation within the block, for comparisons."""
    global _only_torch
    _only_torch = True
    try:
        yield
    finally:
        _only_torch = False


def check(tensors: dict[str, torch.Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]) -> None:
    """Check that a kernel can read the tensors correctly.

    Args:
        tensors: tensors keyed by the names used in error messages; all must be on one device.
        dtypes: accepted dtypes, keyed by name; names without an entry accept any dtype.

    Raises:
        ValueError: an unaccepted dtype, several devices, a non-contiguous tensor, or a dimension
            beyond int32.
    """
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        accepted = dtypes.get(name, (tensor.dtype,))
        if tensor.dtype not in accepted:
            raise ValueError(
                f"{name} is {tensor.dtype}; expected {' or '.join(map(str, accepted))}"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, but the first tensor is on {device}; all tensors "
                "must be on the same device"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "contiguous; pass tensor.contiguous()"
            )
        if max(tensor.shape, default=0) > LARGEST:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; dimensions must be at most {LARGEST}"
            )
