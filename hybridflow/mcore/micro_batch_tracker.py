"""Which micro-batch a router is computing: Megatron tells a router nothing of the batch, and computes some
micro-batches twice.

A forward hook of the model notes what the micro-batch carries in its `PackedSeqParams`. A router that is called outside
of any forward pass recomputes activations for the backward pass. Under 1F1B, forwards of later micro-batches and
recomputations of earlier ones alternate, but backward passes come in the order of the forwards: the recomputation is of
the oldest micro-batch that this router has run without gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


def routers_of(stages: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """The routers of this rank's model chunks, with their names in the chunk."""
    modules = [pair for stage in stages for pair in stage.named_modules()]
    return [(name, module) for name, module in modules if isinstance(module, TopKRouter)]


class MicroBatchTracker:
    """Follows the forward passes of this rank's model chunks."""

    def __init__(self, stages: Sequence[torch.nn.Module], name: str) -> None:
        """Args:
        stages: the rank's model chunks, not yet wrapped.
        name: the attribute of a micro-batch's `PackedSeqParams` that is wanted; one without it counts as none.
        """
        self.current: Any = None
        self.computing = self.with_gradient = False
        self._name = name
        for stage in stages:
            stage.register_forward_pre_hook(self._enter, with_kwargs=True)
            stage.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: torch.nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        self.current = getattr(kwargs.get("packed_seq_params"), self._name, None)
        self.computing, self.with_gradient = True, torch.is_grad_enabled()

    def _leave(self, *_: Any) -> None:
        self.current, self.computing = None, False


class RecomputationQueue:
    """The micro-batches that one router will compute again. Each router has its own queue: a pipeline stage recomputes
    its layers one after another."""

    def __init__(self, tracker: MicroBatchTracker) -> None:
        self._tracker = tracker
        self._pending: deque[Any] = deque()

    def take(self) -> tuple[Any, bool]:
        """(what the micro-batch carries or None, whether this is a recomputation). Call it once in each call of the
        router."""
        tracker = self._tracker
        if not tracker.computing:
            return (self._pending.popleft() if self._pending else None), True
        # inside a forward pass with gradient, a module that runs without it will be recomputed
        if tracker.current is not None and tracker.with_gradient and not torch.is_grad_enabled():
            self._pending.append(tracker.current)
        return tracker.current, False

    def pending(self) -> int:
        """Recomputations that are still to come."""
        return len(self._pending)

    def clear(self) -> None:
        """Expect no recomputation: a pass begins, or has ended."""
        self._pending.clear()
