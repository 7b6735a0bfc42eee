"""Bytes of CPU tensors as Python sees them."""

from __future__ import annotations

import ctypes

import torch


def bytes_of(payload: torch.Tensor) -> memoryview:
    """The memory of `payload` (uint8 `[n]`, contiguous, on the CPU), writable; valid as long as the tensor.

    Not by way of `Tensor.numpy()`: torch never resizes a storage again that numpy has seen, and a payload may be a parameter that is
    offloaded by just that between two syncs.
    """
    return memoryview((ctypes.c_uint8 * payload.numel()).from_address(payload.data_ptr())).cast("B")
