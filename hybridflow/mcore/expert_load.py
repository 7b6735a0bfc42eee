"""The load that moves expert biases counts real tokens; Megatron's router counts the padding of packed micro-batches
too.

Megatron-Core 0.16.1 has a padding mask for that, which reaches no later pipeline stage (gpt_model.py:308) and has the
wrong shape where it is used (router.py:542: [t] against a routing map [t, experts]). So each router's count is
corrected afterwards by the routing map that it returns. The micro-batch's `PackedSeqParams` says which rows are
padding; `micro_batch_tracker` says which micro-batch that is.
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
    """Corrects the counts of this rank's routers that have an expert bias; others count nothing."""

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        """`stages`: the rank's model chunks, not yet wrapped."""
        found = [router for _, router in routers_of(stages) if router.enable_expert_bias]
        tracker = MicroBatchTracker(stages if found else (), "real")
        self._routers = [_Corrected(tracker, router) for router in found]

    def begin(self) -> None:
        """A training pass begins: forget what a pass that failed has left."""
        for router in self._routers:
            router.queue.clear()


class _Corrected:
    """Corrects the count of one router."""

    def __init__(self, tracker: MicroBatchTracker, router: TopKRouter) -> None:
        self.queue = RecomputationQueue(tracker)
        router.register_forward_hook(self._correct)

    def _correct(self, router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        real, _recomputed = self.queue.take()
        if real is None or not torch.is_grad_enabled():  # without gradient nothing was counted (router.py:539)
            return
        if router.config.sequence_parallel:  # this tensor-parallel rank routes its part of the tokens
            real = tensor_share(real)
        # no index by a mask: its size would have to be known on the host, which would wait for the device
        router.local_tokens_per_expert -= (output[1] & ~real.unsqueeze(1)).sum(dim=0)
