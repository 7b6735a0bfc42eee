"""Several policies whose adapters share one base: each policy has its own modules, gradient buffers
and optimizer, but its linears, embeddings and norms use the `Parameter` objects of the base policy,
frozen by `lora.Adapters`.

Megatron's gradient buffers and optimizers skip frozen parameters, so the policies are trained
independently. Each policy runs its own modules, so adapters never have to be switched.
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
    """Return a context manager in which the weights of each Megatron linear are freed immediately
    after its construction. A model that will share weights therefore never needs memory for all of
    them. Shapes and attributes are kept.
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
    """Replace all weights of `models` by the weights of `base_models`, which must have the same
    layout. Adapters of `base_models` are skipped, and expert counters remain separate.

    Raises KeyError if the architectures differ.
    """
    for model, base in zip(models, base_models, strict=True):
        modules = dict(model.named_modules())
        own = held_weights([model])
        shared = {name: one for name, one in held_weights([base]).items() if not is_adapter(name)}
        for name in own:
            path, _, last = name.rpartition(".")
            setattr(modules[path], last, shared[name])
