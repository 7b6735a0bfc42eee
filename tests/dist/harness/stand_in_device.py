"""A device that is not there: torch's `meta` device in place of a GPU.

A tensor on it has a shape and a dtype but no values. A model that is built on it therefore shows
which tensors a GPU run would leave on the CPU, and a pass over it shows where the host would wait
for the device: reading a value (`item`, `tolist`, `nonzero`, `.cpu()`) raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.device.platform import Platform

DEVICE = torch.device("meta")


def install() -> None:
    """Make this process take `meta` for its GPU until it ends.

    `mcore.cpu_compat`, which sends what Megatron asks of CUDA to the CPU, sends it to `meta`
    instead.
    """
    from hybridflow.mcore import cpu_compat

    platform: Any = Platform
    tensor: Any = torch.Tensor
    cpu_compat._CPU = DEVICE
    type_of = tensor.type
    # Megatron's optimizers accept CUDA's type names only
    tensor.type = lambda self, *args, **named: _cuda_name(type_of(self, *args, **named))
    tensor.cuda = lambda self, *_, **__: self.to(DEVICE)
    tensor.pin_memory = lambda self: self
    platform.detect = classmethod(lambda cls: cls("cuda"))
    platform.device = lambda self, local_rank=0: DEVICE
    platform.current_device = lambda self: DEVICE


def _cuda_name(kind: Any) -> Any:
    return f"torch.cuda.{kind.rpartition('.')[2]}" if isinstance(kind, str) else kind


class NoBlockingCopies(TorchDispatchMode):
    """Inside, a copy from the CPU to the stand-in device that would make the host wait raises
    AssertionError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            target = kwargs.get("device") or args[0].device
            waits = target.type == DEVICE.type and not kwargs.get("non_blocking")
            assert not waits, f"the host waits for a copy of {tuple(args[0].shape)} to the device"
        return func(*args, **kwargs)
