"""Operations that are bound by memory traffic: a Triton kernel for GPUs and a torch form for CPUs in one file each.

Callers ask the function of an operation; it takes the kernel where `uses_triton` says so. On a torch without CUDA
Triton is not even imported. The environment variable TRITON_INTERPRET makes it be: 1 runs the kernels in Triton's
interpreter on the CPU (how they are tested), 0 only lets them be compiled for a GPU that is not there.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = torch.version.cuda is not None or "TRITON_INTERPRET" in os.environ
LARGEST = 2**31 - 1


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are Triton's; the one place that decides it."""
    return TRITON and (tensor.is_cuda or INTERPRETED)


def check(tensors: dict[str, torch.Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]) -> None:
    """Refuse what a kernel would read wrongly.

    Args:
        tensors: by the name that the message gives them; all must be on one device.
        dtypes: those accepted, for the names that are restricted.

    Raises:
        ValueError: another dtype, several devices, a tensor that is not contiguous, or one with a dimension beyond
            int32.
    """
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        accepted = dtypes.get(name, (tensor.dtype,))
        if tensor.dtype not in accepted:
            raise ValueError(f"{name} is {tensor.dtype}; {' or '.join(map(str, accepted))} is accepted")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the first tensor on {device}; they must be on one device")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                "give tensor.contiguous()"
            )
        if max(tensor.shape, default=0) > LARGEST:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; dimensions are at most {LARGEST}")
