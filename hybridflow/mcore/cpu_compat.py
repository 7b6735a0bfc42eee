"""Replacements for CUDA functions that let Megatron-Core 0.16.1 run on CPU.

On CPU, `bootstrap` installs them before megatron is imported; with CUDA they are never installed.

Megatron queries torch.cuda for its device, streams and random state without checking that CUDA
exists, creates tensors with `device="cuda"`, and compares type strings. Each replacement below
names its caller. `gloo_guards` handles the limitations of gloo.
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
        def get_state(self) -> torch.Tensor:
            return torch.get_rng_state()

        def set_state(self, state: torch.Tensor) -> None:
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
    from hybridflow.mcore import gloo_guards

    gloo_guards.install()


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

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
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
    tensor: Any = torch.Tensor
    original_to = tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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
    tensor: Any = torch.Tensor
    original_type = tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if (
            isinstance(result, str)
            and not result.startswith("torch.cuda.")
            and _MEGATRON in sys._getframe(1).f_code.co_filename
        ):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.type = type_
