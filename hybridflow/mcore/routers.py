"""Megatron's routers of experts: the micro-batch that a router is processing, counts of expert load
without padding, routing by softmax with a bias, and router losses.

Which micro-batch: Megatron does not pass this information to routers, and computes some
micro-batches twice. A forward hook on the model stores an attribute of the micro-batch's
`PackedSeqParams`. A router called outside of any forward pass is recomputing activations for the
backward pass. Under 1F1B, forward passes of later micro-batches alternate with recomputations of
earlier ones, but backward passes run in forward order. A recomputation therefore belongs to the
oldest micro-batch that this router has run without gradient.

Expert load: the counts determine the updates of expert biases, and Megatron's router also counts
the padding of packed micro-batches. Megatron-Core 0.16.1 has a padding mask for this purpose, but
it is not passed to later pipeline stages (gpt_model.py:308) and has the wrong shape where it is
used (router.py:542: [t] against a routing map [t, experts]). Instead, each router's count is
corrected afterwards, using the routing map that the router returns. The micro-batch's
`PackedSeqParams` marks padding rows.

Softmax with a bias (ERNIE 4.5): Megatron supports an expert bias only for sigmoid scores.

Router losses: load balancing (Switch Transformer, arXiv 2101.03961, equation 4, over Megatron's
choice of the k highest scores) and the z-loss (ST-MoE, arXiv 2202.08906, equation 5). Megatron's
own implementation cannot be used, for two reasons. It includes the padding of packed micro-batches,
and it weights a micro-batch by its packed tokens, including prompts and padding, whereas the
gradient is divided by the policy loss's count of response tokens or sequences. Here, with T_m real
tokens in micro-batch m and T in the mini-batch over all ranks, the mini-batch's losses are

    balancing = sum_m T_m / T * E * sum_i f_mi P_mi
    z = 1 / T * sum_tokens logsumexp(logits)^2

where f_mi is the fraction of the T_m k choices that go to expert i, and P_mi is its mean score.
Each layer's losses are multiplied by their coefficients and added to the policy's loss. The z-loss
does not depend on how the mini-batch is split; the balancing loss is computed per micro-batch, as
in Megatron.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import device, is_last_stage, tensor_share
from hybridflow.models.layout import LocalTensor

_LEAST_SUM = 1e-12
AUX = "actor/router_aux_loss"
Z = "actor/router_z_loss"


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
        self._hooks: list[RemovableHandle] = []
        for stage in stages:
            self._hooks += [
                stage.register_forward_pre_hook(self._enter, with_kwargs=True),
                stage.register_forward_hook(self._leave, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

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

    def _correct(self, router: TopKRouter, _: Any, output: tuple[Tensor, Tensor]) -> None:
        real, _recomputed = self.queue.take()
        # the router does not count without gradient (router.py:539)
        if real is None or not torch.is_grad_enabled():
            return
        # this tensor-parallel rank routes only its share of the tokens
        if router.config.sequence_parallel:
            real = tensor_share(real)
        # no boolean indexing: the size of its result would force a device sync
        router.local_tokens_per_expert -= (output[1] & ~real.unsqueeze(1)).sum(dim=0)


def allow_biased_softmax(config: TransformerConfig) -> None:
    """Make Megatron's router support an expert bias with softmax scores, if the model has both.
    Idempotent."""
    original = megatron_router.topk_routing_with_score_function
    is_biased = config.moe_router_enable_expert_bias
    if not is_biased or config.moe_router_score_function != "softmax":
        return
    if getattr(original, "from_hybridflow", False):
        return

    def topk_routing_with_score_function(
        logits: Tensor, topk: int, *args: Any, **named: Any
    ) -> Any:
        if named.get("expert_bias") is None or named.get("score_function") != "softmax":
            return original(logits, topk, *args, **named)
        return _biased_softmax(logits, topk, named["expert_bias"], named.get("router_replay"))

    topk_routing_with_score_function.from_hybridflow = True  # type: ignore[attr-defined]
    megatron_router.topk_routing_with_score_function = topk_routing_with_score_function


def shape_biases(model: torch.nn.Module, described: Sequence[LocalTensor]) -> None:
    """Reshape expert biases to their shape in the checkpoint ([1, experts] for ERNIE)."""
    for local in described:
        if local.is_buffer:
            module: Any = model.get_submodule(local.name.rpartition(".")[0])
            module.expert_bias = module.expert_bias.view(local.shape)
            module.local_tokens_per_expert = module.local_tokens_per_expert.view(local.shape)


def _biased_softmax(logits: Tensor, topk: int, bias: Tensor, replay: Any) -> tuple[Tensor, Tensor]:
    """Return (weights, mask of chosen experts), both [tokens, experts], for logits [tokens,
    experts].

    The bias affects the choice of experts, not their weights, which sum to 1.
    """
    scores = logits.softmax(-1, dtype=torch.float32)
    biased = scores + bias

    def best(values: Tensor, count: int, **_: Any) -> tuple[Tensor, Tensor]:
        found = values.topk(count, dim=-1)
        return found.values, found.indices

    if replay is None:
        _, chosen = best(biased, topk)
    else:
        _, chosen = replay.get_replay_topk(biased, topk, None, None, best)
    weights = scores.gather(-1, chosen)
    weights = (weights / weights.sum(-1, keepdim=True).clamp(min=_LEAST_SUM)).to(logits.dtype)
    nothing = torch.zeros_like(logits)
    return nothing.scatter(-1, chosen, weights), nothing.bool().scatter(-1, chosen, True)


class RouterLosses:
    """Adds the losses of this rank's routers to each update and reports them."""

    def __init__(self, stages: Sequence[torch.nn.Module], aux_coef: float, z_coef: float) -> None:
        """`stages` are this rank's model chunks, not yet wrapped for training. At least one
        coefficient is not 0."""
        self.coefs = {AUX: aux_coef, Z: z_coef}
        found = [router for _, router in routers_of(stages)]
        tracker = MicroBatchTracker(stages if found else (), "real")
        self._queues = [RecomputationQueue(tracker) for _ in found]
        for router, queue in zip(found, self._queues, strict=True):
            # called with the logits of the rank's tokens before experts are selected
            router.apply_z_loss = functools.partial(self._attach, router, queue)
        self._weight = 0.0
        self._tokens = 0.0
        self._sums = torch.zeros(2, device=device())

    def begin(self, micro_batches: Sequence[MicroBatch], count: Tensor) -> None:
        """Start an update.

        `count` is the policy loss's count over this data-parallel rank's micro-batches. Collective
        over the data-parallel and context-parallel ranks.
        """
        for queue in self._queues:
            queue.clear()
        real = sum(float(micro.packed.real.sum()) for micro in micro_batches)
        totals = torch.tensor(
            [real, float(count) / parallel_state.get_context_parallel_world_size()]
        ).to(device())
        dist.all_reduce(
            totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        self._tokens, counted = totals.tolist()
        # the final gradient is divided by the count of all micro-batches, if it is not 0
        # (finalize_model_grads.py:490)
        self._weight = max(counted, 1.0) / max(self._tokens, 1.0)
        self._sums = torch.zeros(2, device=device())

    def _attach(
        self, router: Any, queue: RecomputationQueue, logits: Tensor, padding_mask: Any = None
    ) -> Tensor:
        """Return the logits [n, E] with the losses attached, so that their gradient is added in the
        backward pass."""
        real, _ = queue.take()
        if real is None or not (router.training and torch.is_grad_enabled()):
            return logits
        # this tensor-parallel rank routes only its share of the tokens
        if router.config.sequence_parallel:
            real = tensor_share(real)
        sums = torch.stack(
            [self._balancing(router, logits, real), (logits.logsumexp(-1) ** 2 * real).sum()]
        )
        self._sums += sums.detach()
        # multiply by host numbers: creating a tensor from them would force a device sync
        loss = self.coefs[AUX] * sums[0] + self.coefs[Z] * sums[1]
        return MoEAuxLossAutoScaler.apply(logits, loss * self._weight)

    def _balancing(self, router: Any, logits: Tensor, real: Tensor) -> Tensor:
        """Return this rank's part of T_m * E * sum_i f_i P_i."""
        if not self.coefs[AUX]:
            return logits.new_zeros(())
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, router.topk, router.score_function
        )
        tokens = torch.cat([(chosen & real[:, None]).sum(0), real.sum()[None]]).to(scores.dtype)
        dist.all_reduce(tokens, group=parallel_state.get_tensor_and_context_parallel_group())
        scale = logits.shape[-1] / (router.topk * tokens[-1].clamp(min=1.0))
        return scale * ((scores * real[:, None]).sum(0) * tokens[:-1]).sum()

    def end(self) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of each loss in the update that has finished, averaged over layers;
        empty outside the last stage.

        Collective over all ranks.
        """
        found = torch.cat([self._sums, torch.tensor([float(len(self._queues))], device=device())])
        dist.all_reduce(found[:2], group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(found, group=parallel_state.get_pipeline_model_parallel_group())
        *sums, layers = found.tolist()
        if not is_last_stage():
            return {}
        # the driver adds up sums and counts: the sums cover this data-parallel rank, the tokens all
        # ranks
        share = self._tokens / parallel_state.get_data_parallel_world_size()
        losses: dict[str, tuple[float, float]] = {}
        for name, total in zip(self.coefs, sums, strict=True):
            if self.coefs[name]:
                losses[name] = (total / layers, share)
        return losses
