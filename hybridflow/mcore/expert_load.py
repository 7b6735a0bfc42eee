"""The load that moves expert biases counts real tokens: Megatron's router counts the padding of packed micro-batches,
too.

Megatron-Core 0.16.1 has a padding mask for that, which reaches no later pipeline stage (gpt_model.py:308) and has the
wrong shape where it is used (router.py:542: [t] against a routing map [t, experts]). So each router's count is
corrected after the fact, on the routing map that it returns. Which rows are padding hangs on the micro-batch's
`PackedSeqParams`; `underway` says which micro-batch that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.underway import Turns, Underway


class ExpertLoad:
    """Watches the routers of this rank that have an expert bias; there is nothing to do for others."""

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        """`stages`: the rank's model chunks, not yet wrapped."""
        found = [
            module
            for stage in stages
            for module in stage.modules()
            if isinstance(module, TopKRouter) and module.enable_expert_bias
        ]
        underway = Underway(stages if found else (), "real")
        self._routers = [_Corrected(underway, router) for router in found]

    def begin(self) -> None:
        """A training pass begins: what an earlier one that failed has left is forgotten."""
        for router in self._routers:
            router.turns.forget()


class _Corrected:
    """One router."""

    def __init__(self, underway: Underway, router: TopKRouter) -> None:
        self.turns = Turns(underway)
        router.register_forward_hook(self._correct)

    def _correct(self, router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        real, _recomputed = self.turns.take()
        if real is None or not torch.is_grad_enabled():  # without gradient nothing was counted (router.py:539)
            return
        if router.config.sequence_parallel:  # this tensor-parallel rank routes its part of the tokens
            size, rank = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            real = real.view(size, -1)[rank]
        router.local_tokens_per_expert -= output[1][~real].sum(dim=0)
