"""Several policies whose adapters share one base: a policy has its own modules, gradient buffers
and optimizer, but the parameters of its linears, embeddings and norms are another policy's.

They are the same `Parameter` objects, frozen by `lora.Adapters`. Megatron's gradient buffers and
optimizers skip frozen parameters, so nothing of a policy's training depends on the others. A pass
of a policy is a pass of its own modules: no adapter is selected, and nothing is switched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn.modules.module import register_module_module_registration_hook

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.model import held_weights
from hybridflow.models.lora import is_adapter


@contextmanager
def without_linears() -> Iterator[None]:
    """Return a context manager in which Megatron's linears lose the memory of their weights as soon
    as they have been constructed, so that a model to be shared never needs memory for all of its
    weights. Shapes and attributes stay.
    """
    handle = register_module_module_registration_hook(_drop)
    try:
        yield
    finally:
        handle.remove()


def _drop(parent: torch.nn.Module, name: str, child: Any) -> None:
    if child is None or not (isinstance(parent, MegatronModule) and name.startswith("linear_")):
        return
    for parameter in child.parameters():
        parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def share_weights(
    models: Sequence[torch.nn.Module], base_models: Sequence[torch.nn.Module]
) -> None:
    """Replace all weights of `models` by those of `base_models`, which have the same layout.
    Adapters of `base_models` are left out, and counters of experts stay separate.

    Raises KeyError if the architectures differ.
    """
    for model, base in zip(models, base_models, strict=True):
        modules = dict(model.named_modules())
        own = held_weights([model])
        shared = {name: one for name, one in held_weights([base]).items() if not is_adapter(name)}
        for name in own:
            path, _, last = name.rpartition(".")
            setattr(modules[path], last, shared[name])
