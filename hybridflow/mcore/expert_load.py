"""The load that moves expert biases counts real tokens: Megatron's router counts the padding of packed micro-batches, too.

Megatron-Core 0.16.1 has a padding mask for that, which reaches no later pipeline stage (gpt_model.py:308) and has the wrong shape where it
is used (router.py:542: [t] against a routing map [t, experts]). So each router's count is corrected after the fact, on the routing map that
it returns. Which rows are padding hangs on the micro-batch's `PackedSeqParams`; a forward hook of the model says which micro-batch is being
computed, and a recomputation (a router called outside any forward) takes the oldest one that was run without gradient: the order of the
schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


class ExpertLoad:
    """Watches the routers of this rank that have an expert bias; there is nothing to do for others."""

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        """`stages`: the rank's model chunks, not yet wrapped."""
        self.current: torch.Tensor | None = None
        self.computing = self.with_gradient = False
        found = [module for stage in stages for module in stage.modules() if isinstance(module, TopKRouter) and module.enable_expert_bias]
        self._routers = [_Corrected(self, router) for router in found]
        for stage in stages if found else ():
            stage.register_forward_pre_hook(self._enter, with_kwargs=True)
            stage.register_forward_hook(self._leave, always_call=True)

    def begin(self) -> None:
        """A training pass begins: what an earlier one that failed has left is forgotten."""
        for router in self._routers:
            router.pending.clear()

    def _enter(self, _: torch.nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        self.current = getattr(kwargs.get("packed_seq_params"), "real", None)
        self.computing, self.with_gradient = True, torch.is_grad_enabled()

    def _leave(self, *_: Any) -> None:
        self.current, self.computing = None, False


class _Corrected:
    """One router."""

    def __init__(self, load: ExpertLoad, router: TopKRouter) -> None:
        self.load = load
        self.pending: deque[torch.Tensor] = deque()  # rows of micro-batches that were run without gradient and will be recomputed
        router.register_forward_hook(self._correct)

    def _correct(self, router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        load, real = self.load, self.load.current
        if not torch.is_grad_enabled():  # not counted (router.py:539)
            if load.computing and load.with_gradient and real is not None:
                self.pending.append(real)
            return
        if not load.computing:
            real = self.pending.popleft() if self.pending else None
        if real is None:
            return
        if router.config.sequence_parallel:  # this tensor-parallel rank routes its part of the tokens
            size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
            real = real.view(size, -1)[rank]
        router.local_tokens_per_expert -= output[1][~real].sum(dim=0)
