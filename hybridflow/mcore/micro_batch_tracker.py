"""Identifies the micro-batch that a router is processing. Megatron does not pass this information
to routers, and computes some micro-batches twice.

A forward hook on the model stores an attribute of the micro-batch's `PackedSeqParams`. A router
called outside of any forward pass is recomputing activations for the backward pass. Under 1F1B,
forward passes of later micro-batches alternate with recomputations of earlier ones, but backward
passes run in forward order. A recomputation therefore belongs to the oldest micro-batch that this
router has run without gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


def routers_of(stages: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """Return (name within the chunk, router) for every router in this rank's model chunks."""
    routers = []
    for stage in stages:
        for name, module in stage.named_modules():
            if isinstance(module, TopKRouter):
                routers.append((name, module))
    return routers


class MicroBatchTracker:
    """Tracks the forward passes of this rank's model chunks."""

    def __init__(self, stages: Sequence[torch.nn.Module], name: str) -> None:
        """Register hooks on the model chunks.

        Args:
            stages: this rank's model chunks, not yet wrapped for training.
            name: the attribute of `PackedSeqParams` to track; a micro-batch without it yields None.
        """
        self.current: Any = None
        self.computing = self.with_gradient = False
        self._name = name
        for stage in stages:
            stage.register_forward_pre_hook(self._enter, with_kwargs=True)
            stage.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: torch.nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        self.current = getattr(kwargs.get("packed_seq_params"), self._name, None)
        self.with_gradient = torch.is_grad_enabled()
        self.computing = True

    def _leave(self, *_: Any) -> None:
        self.current = None
        self.computing = False


class RecomputationQueue:
    """The micro-batches that one router will recompute.

    Each router has a separate queue, since a pipeline stage recomputes its layers one after
    another.
    """

    def __init__(self, tracker: MicroBatchTracker) -> None:
        self._tracker = tracker
        self._pending: deque[Any] = deque()

    def take(self) -> tuple[Any, bool]:
        """Return (the micro-batch's tracked attribute or None, True if this is a recomputation).

        Must be called once per router call.
        """
        tracker = self._tracker
        if not tracker.computing:
            return (self._pending.popleft() if self._pending else None), True
        # a module that runs without gradient inside a forward pass with gradient will be recomputed
        if tracker.current is not None and tracker.with_gradient and not torch.is_grad_enabled():
            self._pending.append(tracker.current)
        return tracker.current, False

    def pending(self) -> int:
        """Return the number of outstanding recomputations."""
        return len(self._pending)

    def clear(self) -> None:
        """Drop all expected recomputations. Called at the start or end of a pass."""
        self._pending.clear()
