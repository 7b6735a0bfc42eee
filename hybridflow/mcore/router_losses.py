"""Router losses: load balancing (Switch Transformer, arXiv 2101.03961, equation 4, over Megatron's
choice of the k highest scores) and the z-loss (ST-MoE, arXiv 2202.08906, equation 5).

Megatron's own implementation cannot be used, for two reasons. It includes the padding of packed
micro-batches (`expert_load` explains why Megatron's padding mask does not help), and it weights a
micro-batch by its packed tokens, including prompts and padding, whereas the gradient is divided by
the policy loss's count of response tokens or sequences. Here, with T_m real tokens in micro-batch m
and T in the mini-batch over all ranks, the mini-batch's losses are

    balancing = sum_m T_m / T * E * sum_i f_mi P_mi
    z = 1 / T * sum_tokens logsumexp(logits)^2

where f_mi is the fraction of the T_m k choices that go to expert i, and P_mi is its mean score.
Each layer's losses are multiplied by their coefficients and added to the policy's loss. The z-loss
does not depend on how the mini-batch is split; the balancing loss is computed per micro-batch, as
in Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.micro_batch_tracker import MicroBatchTracker, RecomputationQueue, routers_of
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import device, is_last_stage, tensor_share

AUX = "actor/router_aux_loss"
Z = "actor/router_z_loss"


class RouterLosses:
    """Adds the losses of this rank's routers to each update and reports them."""

    def __init__(self, stages: Sequence[torch.nn.Module], aux_coef: float, z_coef: float) -> None:
        """`stages` are this rank's model chunks, not yet wrapped for training. If both coefficients
        are 0, nothing is changed."""
        self.coefs = {AUX: aux_coef, Z: z_coef}
        found = [router for _, router in routers_of(stages)] if any(self.coefs.values()) else []
        tracker = MicroBatchTracker(stages if found else (), "real")
        self._queues = [RecomputationQueue(tracker) for _ in found]
        for router, queue in zip(found, self._queues, strict=True):
            # called with the logits of the rank's tokens before experts are selected
            router.apply_z_loss = functools.partial(self._attach, router, queue)
        self._weight = 0.0
        self._tokens = 0.0
        self._sums = torch.zeros(2, device=device())

    def begin(self, micro_batches: Sequence[MicroBatch], count: torch.Tensor) -> None:
        """Start an update.

        `count` is the policy loss's count over this data-parallel rank's micro-batches. Collective
        over the data-parallel and context-parallel ranks.
        """
        if not any(self.coefs.values()):
            return
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
        self, router: Any, queue: RecomputationQueue, logits: torch.Tensor, padding_mask: Any = None
    ) -> torch.Tensor:
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

    def _balancing(self, router: Any, logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
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
        if not any(self.coefs.values()):
            return {}
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
