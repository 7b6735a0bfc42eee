"""Bytes of CPU tensors as Python sees them."""

from __future__ import annotations

import ctypes

import torch

_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def bytes_of(payload: torch.Tensor) -> memoryview:
    """The memory of `payload` (uint8 `[n]`, contiguous, on the CPU), writable; valid as long as the tensor.

    Not by way of `Tensor.numpy()`: torch never resizes a storage again that numpy has seen, and a payload may be a parameter that is
    offloaded by just that between two syncs. Nor by a ctypes array: there is a type for each length, and they are made again and again.
    """
    view: memoryview = _view(payload.data_ptr(), payload.numel(), _WRITABLE)
    return view
