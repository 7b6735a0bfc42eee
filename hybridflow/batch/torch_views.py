"""numpy arrays as torch tensors and back, without copies. Only this module of the room imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridflow.errors import SchemaError


class _Writable:
    """Hands numpy the same memory without the read-only flag and keeps the owner alive.

    `torch.from_numpy` prints a UserWarning for a read-only array (torch has no read-only tensors); silencing it with
    `warnings.catch_warnings` would not be thread-safe.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def view(array: npt.NDArray[Any], bfloat16: bool = False) -> torch.Tensor:
    """Tensor over the memory of `array` (any shape); uint16 seen as bfloat16 when asked. Only reversed strides are
    copied."""
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    tensor = torch.from_numpy(np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_numpy(name: str, tensor: torch.Tensor) -> tuple[npt.NDArray[Any], bool]:
    """Array over the memory of a CPU tensor (copied from another device) and whether its bits are bfloat16 (then
    uint16). SchemaError names the column `name` where numpy has no such type: fp8, for example."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy(), True
    try:
        return tensor.numpy(), False
    except TypeError as error:
        raise SchemaError(
            f"column {name!r} has dtype {tensor.dtype}, which numpy lacks; convert it, or store its bytes as uint8"
        ) from error
