"""Corrects the expert load counts that determine the updates of expert biases.

Megatron's router also counts the padding of packed micro-batches. Megatron-Core 0.16.1 has a
padding mask for this purpose, but it is not passed to later pipeline stages (gpt_model.py:308) and
has the wrong shape where it is used (router.py:542: [t] against a routing map [t, experts]).
Instead, each router's count is corrected afterwards, using the routing map that the router returns.
The micro-batch's `PackedSeqParams` marks padding rows; `micro_batch_tracker` identifies the
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.micro_batch_tracker import MicroBatchTracker, RecomputationQueue, routers_of
from hybridflow.mcore.parallel import tensor_share


class ExpertLoad:
    """Corrects the counts of all routers with an expert bias on this rank. Megatron counts only
    for such routers.
    """

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        """`stages` are this rank's model chunks, not yet wrapped for training."""
        found = []
        for _, router in routers_of(stages):
            if router.enable_expert_bias:
                found.append(router)
        tracker = MicroBatchTracker(stages if found else (), "real")
        self._routers = [_Corrected(tracker, router) for router in found]

    def begin(self) -> None:
        """Start a training pass, discarding any state left by a failed pass."""
        for router in self._routers:
            router.queue.clear()


class _Corrected:
    """Corrects the count of one router."""

    def __init__(self, tracker: MicroBatchTracker, router: TopKRouter) -> None:
        self.queue = RecomputationQueue(tracker)
        router.register_forward_hook(self._correct)

    def _correct(
        self, router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        real, _recomputed = self.queue.take()
        # the router does not count without gradient (router.py:539)
        if real is None or not torch.is_grad_enabled():
            return
        # this tensor-parallel rank routes only its share of the tokens
        if router.config.sequence_parallel:
            real = tensor_share(real)
        # no boolean indexing: the size of its result would force a device sync
        router.local_tokens_per_expert -= (output[1] & ~real.unsqueeze(1)).sum(dim=0)
