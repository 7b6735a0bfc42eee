"""The reference that a policy keeps as a second copy of its weights, whichever backend trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class HoldsReference(ABC):
    """A model that may have an optimizer and a frozen copy of its weights, both of them given to it later."""

    optimizer: Any = None
    _reference: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a reference is a copy of: this rank's live tensors by name."""

    @property
    def has_optimizer(self) -> bool:
        """Whether `set_optimizer` has been called."""
        return self.optimizer is not None

    @property
    def has_reference(self) -> bool:
        """Whether `freeze_reference` has been called (or a reference was loaded)."""
        return self._reference is not None

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Keep the present weights as the reference policy."""
        self._reference = {name: tensor.detach().clone() for name, tensor in self.weights().items()}

    def reference_state(self) -> dict[str, torch.Tensor]:
        """The reference's local tensors by the names of `weights`."""
        if self._reference is None:
            raise RuntimeError("no reference weights: freeze_reference was not called")
        return self._reference

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """`with policy.as_reference():` computes with the reference's weights (exchanged in place, so no second model
        is held)."""
        live, held = self.weights(), self.reference_state()
        _exchange(live, held)
        try:
            yield
        finally:
            _exchange(live, held)


@torch.no_grad()
def _exchange(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    # values are exchanged, not storages: optimizers and gradient buffers hold views of the weights
    for name, tensor in live.items():
        before = tensor.detach().clone()
        tensor.copy_(held[name])
        held[name].copy_(before)
