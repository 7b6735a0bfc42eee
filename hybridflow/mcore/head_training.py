"""Training of multi-token-prediction heads next to the policy.

Every update of the policy also updates the heads. Their loss is the cross-entropy of the tokens
that an engine would draft (`mcore.ahead`), computed from the hidden states of the policy's own
forward pass. Training the heads cannot change the policy: hidden states, embedding and output layer
are detached, and the heads have separate gradient buffers, gradient norm and optimizer. A head's
backward pass runs immediately after the forward pass of its micro-batch, independently of the
pipeline schedule.

With D heads and N_k targets of depth k in the mini-batch over all ranks, the heads' loss is
coef / D * sum_k 1 / N_k sum -log p_k(target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms.losses import not_finite
from hybridflow.algorithms.vocab_parallel import Scoring, log_probs_and_entropy, top_log_probs
from hybridflow.config.schema import OptimConfig, ParallelConfig
from hybridflow.mcore.model import wrap_for_training
from hybridflow.mcore.optimizer import Optimizer, set_adam_step
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import device, is_last_stage
from hybridflow.mcore.prediction_heads import Heads

LOSS = "actor/mtp/loss"
ACCURACY = "actor/mtp/accuracy"
GRAD_NORM = "actor/mtp/grad_norm"
SKIPPED = "actor/mtp/skipped_updates"


@dataclass(frozen=True)
class HeadSettings:
    """Training settings of the prediction heads: loss coefficient and learning rate (None uses the
    policy's)."""

    coef: float = 0.1
    lr: float | None = None


def train_heads(
    heads: Heads | None,
    stages: Sequence[GPTModel],
    parallel: ParallelConfig,
    settings: HeadSettings | None,
) -> HeadTraining | None:
    """Create the training state of the heads, including gradient buffers; None if `heads` is
    None."""
    if heads is None:
        return None
    return HeadTraining(heads, stages, parallel, settings or HeadSettings())


class HeadTraining:
    """The heads of this rank with their gradients and optimizer. Methods are collectives unless
    stated otherwise."""

    def __init__(
        self,
        heads: Heads,
        stages: Sequence[GPTModel],
        parallel: ParallelConfig,
        settings: HeadSettings,
    ) -> None:
        """`stages` are this rank's model chunks, not yet wrapped for training."""
        self.heads = heads
        self.settings = settings
        # backward passes of heads do not overlap with each other or with the model's
        self._parallel = replace(parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        self.chunk = wrap_for_training([heads], self._parallel)[0]
        self.optimizer: Optimizer | None = None
        self.updates = 0  # applied so far, also known on stages without heads
        self._is_training = False
        self._seen: tuple[Tensor, Any] | None = None
        self._shares = torch.zeros(heads.count)
        # cross-entropy, correct predictions and targets of the mini-batch, by depth
        self._sums = torch.zeros(3, heads.count)
        if heads.layers:
            stages[-1].decoder.register_forward_hook(self._note, with_kwargs=True)

    def set_optimizer(self, config: OptimConfig, dtype: torch.dtype) -> None:
        """Create a new optimizer for the heads. `config` is the policy's optimizer config."""
        lr = self.settings.lr or config.lr
        min_lr = min(config.min_lr, lr)
        own = replace(config, lr=lr, min_lr=min_lr)
        self.optimizer = Optimizer([self.chunk], own, self._parallel, dtype)
        self.updates = 0

    # ---- one update

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Start an update on this data-parallel rank's micro-batches."""
        assert self.optimizer is not None, "update called before set_optimizer"
        self.optimizer.zero_grad()
        self._sums = torch.zeros(3, self.heads.count, device=device())
        if not self.heads.layers:
            return
        self._is_training = True
        for micro in micro_batches:
            for depth, ahead in enumerate(micro.ahead):
                self._sums[2, depth] += len(ahead.targets)
        counts = self._sums[2].clone()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(counts, group=group)
        self._shares = self.settings.coef / self.heads.count / counts.clamp(min=1.0)

    def _note(self, decoder: Any, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        """Forward hook: save the last chunk's hidden states and rotary angles during an update."""
        if self._is_training and torch.is_grad_enabled():
            self._seen = output.detach(), named.get("rotary_pos_emb")

    def learn(self, micro: MicroBatch, scoring: Scoring) -> None:
        """Accumulate the heads' gradients for a micro-batch. Called after the last chunk's forward
        pass over the micro-batch.

        Collective over the ranks of the last stage that share its tokens or experts.
        """
        assert self._seen is not None, "learn called without a forward pass"
        states, angles = self._seen
        self._seen = None
        scoring = replace(scoring, with_entropy=False)
        heads = self.heads
        weight = heads.output_weight()
        group = parallel_state.get_tensor_model_parallel_group()
        loss_sums, correct, _ = self._sums
        total = torch.zeros((), device=device())
        for depth, (head, ahead) in enumerate(zip(heads.layers, micro.ahead, strict=True)):
            embedded = heads.embedded(ahead.tokens, micro.positions)
            states = head(states, embedded, angles, micro.packed)
            rows = heads.gathered(states)[:, 0].index_select(0, ahead.rows)
            log_probs, _ = log_probs_and_entropy(rows, weight, ahead.targets, scoring, group)
            total = total - self._shares[depth] * log_probs.sum()
            _, best = top_log_probs(rows.detach(), weight, 1, scoring, group)
            loss_sums[depth] -= log_probs.detach().sum()
            correct[depth] += (best[:, 0] == ahead.targets).sum()
        total.backward()

    def end(self) -> dict[str, tuple[float, float]]:
        """Reduce the gradients. Returns (sum, count) of each metric; empty outside the last
        stage."""
        self._is_training = False
        finalize_model_grads([self.chunk])
        if not is_last_stage():
            return {}
        dist.all_reduce(self._sums, group=parallel_state.get_context_parallel_group())
        losses, correct, counts = self._sums.tolist()
        count = sum(counts)
        found = {LOSS: (sum(losses), count), ACCURACY: (sum(correct), count)}
        if self.heads.count > 1:
            for depth, count in enumerate(counts, start=1):
                found[f"actor/mtp/depth_{depth}/loss"] = losses[depth - 1], count
                found[f"actor/mtp/depth_{depth}/accuracy"] = correct[depth - 1], count
        return found

    def step(self) -> dict[str, tuple[float, float]]:
        """Update the heads. Called after the policy's update. If a gradient is not finite, only the
        heads' update is skipped, because the heads do not affect the policy. Returns metrics in the
        same format as `end`."""
        assert self.optimizer is not None
        bad = torch.zeros((), dtype=torch.int32, device=device())
        for buffer in (*self.chunk.buffers, *self.chunk.expert_parallel_buffers):
            bad += not_finite(buffer.grad_data)
        dist.all_reduce(bad)
        metrics = {SKIPPED: (1.0, 1.0)}
        if not int(bad):
            _, norm, _ = self.optimizer.step()
            self.updates += 1
            metrics = {GRAD_NORM: (norm, 1.0), SKIPPED: (0.0, 1.0)}
        return metrics if is_last_stage() else {}

    # ---- checkpoints

    def facts(self) -> dict[str, int]:
        """Return the counts for a checkpoint: updates and schedule steps. Not collective."""
        assert self.optimizer is not None
        return {"updates": self.updates, "scheduled": self.optimizer.scheduler.num_steps}

    def restore(self, facts: dict[str, int]) -> None:
        """Continue from `facts`, the counts that a checkpoint has stored. Not collective."""
        assert self.optimizer is not None
        self.updates = int(facts["updates"])
        set_adam_step(self.optimizer.inner, self.updates)
        self.optimizer.scheduler.num_steps = int(facts["scheduled"])
        self.optimizer.scheduler.step(0)
