"""The bytes of a message, as torch and as Python's own calls see them."""

from __future__ import annotations

import ctypes

import torch

_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Payload:
    """Memory that a message is sent from or received into: made once, used in every sync of a session.

    Attributes:
        tensor: uint8 `[n]`, contiguous.
        nbytes: n.
        on_host: whether it is CPU memory.
        memory: the same bytes then, writable, valid as long as the tensor; empty on a GPU.
    """

    __slots__ = ("memory", "nbytes", "on_host", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.nbytes, self.on_host = tensor, tensor.numel(), tensor.is_cpu
        self.memory = _memory_of(tensor) if tensor.is_cpu else memoryview(b"")


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor (uint8 `[n]`, contiguous, on the CPU), writable; valid as long as the tensor.

    Not by way of `Tensor.numpy()`: torch never resizes a storage again that numpy has seen, and a payload may be a
    parameter that is offloaded by just that between two syncs. Nor by a ctypes array: there is a type for each length,
    and they are made again and again.
    """
    view: memoryview = _view(tensor.data_ptr(), tensor.numel(), _WRITABLE)
    return view
