"""Guards for collectives that gloo (torch 2.13) rejects, or for which it silently returns results
that differ from NCCL's.

`scatter` with non-contiguous inputs, `all_reduce` on strided tensors and `broadcast` between
different memory layouts treat the storage as if it were contiguous. `all_gather` with unequal sizes
is rejected, although expert tensor parallelism with expert parallelism needs it
(tensor_parallel/mappings.py:150).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Wrap the affected collectives. Called only if the backend is gloo."""
    guarded = {"all_gather": _all_gather(dist.all_gather), "scatter": _scatter(dist.scatter)}
    guarded |= {name: _contiguous_only(getattr(dist, name)) for name in ("all_reduce", "broadcast")}
    for name, collective in guarded.items():
        setattr(dist, name, collective)
        setattr(distributed_c10d, name, collective)


def _all_gather(original: Any) -> Any:
    def all_gather(
        outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return original(outputs, tensor, group=group, async_op=async_op)
        if async_op:
            raise RuntimeError("gloo: an asynchronous all_gather of unequal sizes is not supported")
        longest = max(output.numel() for output in outputs)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        buffers = [tensor.new_empty(longest) for _ in outputs]
        original(buffers, padded, group=group)
        for output, buffer in zip(outputs, buffers, strict=True):
            output.copy_(buffer[: output.numel()].view_as(output))
        return None

    return all_gather


def _scatter(original: Any) -> Any:
    def scatter(
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _require_contiguous(tensor, "scatter")
        inputs = [item.contiguous() for item in scatter_list] if scatter_list else scatter_list
        return original(tensor, inputs, *args, **kwargs)

    return scatter


def _contiguous_only(original: Any) -> Any:
    @functools.wraps(original)
    def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _require_contiguous(tensor, original.__name__)
        return original(tensor, *args, **kwargs)

    return guarded


def _require_contiguous(tensor: Any, collective: str) -> None:
    if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
        raise RuntimeError(
            f"gloo {collective} on a non-contiguous tensor {tuple(tensor.shape)} stride "
            f"{tensor.stride()} would return wrong data"
        )
