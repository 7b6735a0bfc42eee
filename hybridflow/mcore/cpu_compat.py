"""Replacements for functions of CUDA and gloo that let Megatron-Core 0.16.1 run on CPU.

On CPU, `bootstrap` installs them before megatron is imported; with CUDA they are never installed.

Megatron queries torch.cuda for its device, streams and random state without checking that CUDA
exists, creates tensors with `device="cuda"`, and compares type strings. Each replacement below
names its caller.

Guards wrap the collectives that gloo (torch 2.13) rejects, or for which it silently returns results
that differ from NCCL's: `scatter` with non-contiguous inputs, `all_reduce` on strided tensors and
`broadcast` between different memory layouts treat the storage as if it were contiguous.
`all_gather` with unequal sizes is rejected, although expert tensor parallelism with expert
parallelism needs it (tensor_parallel/mappings.py:150).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_MEGATRON = f"{os.sep}megatron{os.sep}"
_FACTORIES = (
    *(
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "rand",
        "randn",
        "randint",
        "eye",
        "linspace",
        "as_tensor",
    ),
    *("zeros_like", "ones_like", "empty_like", "full_like", "empty_strided"),
)
_installed = False


class _Stream:
    """No-op CUDA stream: on CPU everything runs in order."""

    device = _CPU
    cuda_stream = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    """Stand-in for a CUDA event that reads the wall clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, *_: Any) -> None:
        self.time_s = time.perf_counter()

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.time_s - self.time_s) * 1e3


class _Generators:
    """Stand-in for `torch.cuda.default_generators`, where tensor_parallel/random.py stores its RNG
    states.

    Every index returns the CPU generator.
    """

    class _Default:
        def get_state(self) -> Tensor:
            return torch.get_rng_state()

        def set_state(self, state: Tensor) -> None:
            torch.set_rng_state(state)

        clone_state = graphsafe_get_state = get_state
        graphsafe_set_state = set_state

    def __getitem__(self, _: int) -> _Generators._Default:
        return self._Default()


def install() -> None:
    """Install all replacements. Idempotent. Only for processes that compute on CPU."""
    global _installed
    if _installed:
        return
    _installed = True
    _replace_cuda_state()
    _replace_factories()
    _replace_moves()
    _replace_type_names()
    _guard_collectives()


def _replace_cuda_state() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda *a, **k: None
    cuda.current_stream = cuda.default_stream = lambda *a, **k: stream
    cuda.stream = lambda s=None: contextlib.nullcontext()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *a, **k: torch.set_rng_state(
        state
    )
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    cuda.default_generators = _Generators()
    # tensor_parallel/random.py:113 defers the rng switch through _lazy_call; without CUDA the call
    # would stay queued forever, and the rng fork would silently do nothing
    cuda._lazy_call = lambda callback, **k: callback()
    cuda._lazy_init = lambda: None
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *a, **k: 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: 0


def _is_cuda(device: Any) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == "cuda"


def _replace_factories() -> None:
    """Map `device="cuda"` to the CPU and ignore requests for pinned memory, which needs a
    driver."""

    def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapper

    # `with torch.device("meta")` looks factories up in a set built on first use
    # (torch/utils/_device.py:13). Built after the replacement, it would contain our wrappers but
    # not the functions they call, and transformers would leave rotary tables uninitialised.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _replace_moves() -> None:
    """Make `.cuda()` and `.to("cuda")` no-ops.

    Megatron calls them for tied embeddings across pipeline stages and in some optimizer saves.
    """
    tensor: Any = Tensor
    original_to = tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    tensor.to = to
    tensor.cuda = torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    tensor.record_stream = lambda self, stream: None


def _replace_type_names() -> None:
    """Report tensor types by their CUDA names to callers inside megatron, and by their real names
    to all others.

    Megatron's optimizers compare `param.type()` with 'torch.cuda.FloatTensor' (clip_grads.py:167,
    distrib_optimizer.py:361, 420, 582, optimizer.py:671, 690).
    """
    tensor: Any = Tensor
    original_type = tensor.type

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if (
            isinstance(result, str)
            and not result.startswith("torch.cuda.")
            and _MEGATRON in sys._getframe(1).f_code.co_filename
        ):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.type = type_


def _guard_collectives() -> None:
    """Wrap the affected collectives. Called only if the backend is gloo."""
    guarded = {"all_gather": _all_gather(dist.all_gather), "scatter": _scatter(dist.scatter)}
    guarded |= {name: _contiguous_only(getattr(dist, name)) for name in ("all_reduce", "broadcast")}
    for name, collective in guarded.items():
        setattr(dist, name, collective)
        setattr(distributed_c10d, name, collective)


def _all_gather(original: Any) -> Any:
    def all_gather(
        outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
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
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _require_contiguous(tensor, "scatter")
        inputs = [item.contiguous() for item in scatter_list] if scatter_list else scatter_list
        return original(tensor, inputs, *args, **kwargs)

    return scatter


def _contiguous_only(original: Any) -> Any:
    @functools.wraps(original)
    def guarded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _require_contiguous(tensor, original.__name__)
        return original(tensor, *args, **kwargs)

    return guarded


def _require_contiguous(tensor: Any, collective: str) -> None:
    if isinstance(tensor, Tensor) and not tensor.is_contiguous():
        raise RuntimeError(
            f"gloo {collective} on a non-contiguous tensor {tuple(tensor.shape)} stride "
            f"{tensor.stride()} would return wrong data"
        )
