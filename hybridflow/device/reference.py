"""The policy's frozen reference (a second copy of its weights), implemented independently of the
training backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class HoldsReference(ABC):
    """Base class for models that may have an optimizer and a frozen copy of their weights."""

    optimizer: Any = None
    _reference: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's live tensors, keyed by name. A reference is a copy of them."""

    @property
    def has_optimizer(self) -> bool:
        """True once `set_optimizer` has been called."""
        return self.optimizer is not None

    @property
    def has_reference(self) -> bool:
        """True once `freeze_reference` has been called or a reference has been loaded."""
        return self._reference is not None

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy."""
        self._reference = {name: tensor.detach().clone() for name, tensor in self.weights().items()}

    def reference_state(self) -> dict[str, torch.Tensor]:
        """Return the reference's local tensors, keyed by the same names as `weights`.

        Raises RuntimeError if there is no reference.
        """
        if self._reference is None:
            raise RuntimeError("no reference weights: freeze_reference was not called")
        return self._reference

    @torch.no_grad()
    def take_trained(self, other: HoldsReference) -> None:
        """Copy the weights of another model with the same parameters and layout, and drop the
        optimizer. Call `set_optimizer` again afterwards."""
        theirs = other.weights()
        for name, tensor in self.weights().items():
            tensor.copy_(theirs[name])
        self.optimizer = None

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Return a context manager that swaps in the reference weights.

        Weights are swapped in place, so no second model is needed.
        """
        live = self.weights()
        held = self.reference_state()
        _exchange(live, held)
        try:
            yield
        finally:
            _exchange(live, held)


@torch.no_grad()
def _exchange(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    # swap values, not storages, because optimizers and gradient buffers have views of the weights
    for name, tensor in live.items():
        before = tensor.detach().clone()
        tensor.copy_(held[name])
        held[name].copy_(before)
