"""transformers' models with gated delta nets in float64. Loaded in float64, their layers still compute
rule, decays, norms and softmax in float32, and round as much as what is compared with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Wide(TorchDispatchMode):
    """No tensor is rounded to float32: results asked for in float32 are in float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        return func(*args, **named)


def exact_layers(model: Any) -> Any:
    """Let the layers of a model in float64 compute in float64 throughout, if some have delta nets.
    Returns the model.

    Rotary angles, which are not computed in layers, stay in float32: they are so by definition.
    """
    names = {module: type(module).__name__ for module in model.modules()}
    if any(name.endswith("GatedDeltaNet") for name in names.values()):
        for module, name in names.items():
            if name.endswith(("DecoderLayer", "RMSNorm")):
                module.double()
                module.forward = wide(module.forward)
    return model


def wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with float64 instead of float32 inside."""

    def in_float64(*arguments: Any, **named: Any) -> Any:
        with _Wide():
            return function(*arguments, **named)

    return in_float64
