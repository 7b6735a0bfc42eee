"""Zero-copy conversion between numpy arrays and torch tensors. The only module of this package that
imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridflow.errors import SchemaError


class _Writable:
    """A wrapper that exposes an array's memory to numpy without the read-only flag, and keeps the
    owner alive.

    `torch.from_numpy` emits a UserWarning for a read-only array (torch has no read-only tensors),
    and silencing it with `warnings.catch_warnings` would not be thread-safe.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def view(array: npt.NDArray[Any], bfloat16: bool = False) -> torch.Tensor:
    """Return a tensor that shares the memory of `array` (any shape). With `bfloat16`, uint16 is
    viewed as bfloat16.

    An array with negative strides or non-native byte order is copied.
    """
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    tensor = torch.from_numpy(np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_numpy(name: str, tensor: torch.Tensor) -> tuple[npt.NDArray[Any], bool]:
    """Return an array that shares a CPU tensor's memory, and True if it contains bfloat16 bits
    (stored as uint16).

    Tensors on other devices are copied. For dtypes that numpy does not support, such as fp8, raises
    a SchemaError that names the column `name`.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy(), True
    try:
        return tensor.numpy(), False
    except TypeError as error:
        raise SchemaError(
            f"column {name!r} has dtype {tensor.dtype}, which numpy does not support; convert it, "
            "or store its bytes as uint8"
        ) from error
