"""AdamW over shards, with the same clipping, schedule and weight-decay exemptions as Megatron's
optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.config.schema import OptimConfig


def learning_rate(config: OptimConfig, update: int) -> float:
    """Return the learning rate of update number `update`, counted from 1.

    Linear warm-up, then constant, or decay to `min_lr`. Matches Megatron's
    `OptimizerParamScheduler.get_lr` (optimizer_param_scheduler.py).
    """
    if update <= config.lr_warmup_steps:
        return config.lr * update / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    decay_steps = config.lr_decay_steps or 0
    if update > decay_steps:
        return config.min_lr
    ratio = (update - config.lr_warmup_steps) / (decay_steps - config.lr_warmup_steps)
    share = (
        1.0 - ratio
        if config.lr_decay_style == "linear"
        else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    )
    return config.min_lr + share * (config.lr - config.min_lr)


class Optimizer:
    """The optimizer and its learning-rate schedule, stepped together."""

    def __init__(self, shards: Mapping[str, DTensor], config: OptimConfig) -> None:
        """`shards` are the parameters, keyed by name. Moments start at zero."""
        self.shards = dict(shards)
        self.config = config
        self.updates = 0
        # no weight decay for norms and biases, as in Megatron (optimizer/__init__.py,
        # `_get_param_groups`)
        matrices = [shard for shard in shards.values() if shard.ndim > 1]
        others = [shard for shard in shards.values() if shard.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
        )
        # allocated now, so that a checkpoint can be loaded into a fresh optimizer
        for shard in shards.values():
            self.inner.state[shard] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def zero_grad(self) -> None:
        """Clear the gradients. Called before each mini-batch."""
        self.inner.zero_grad()

    def step(self) -> tuple[float, float]:
        """Clip the gradients, which must be finite, and apply the update.

        Returns (gradient norm before clipping, learning rate used). Collective.
        """
        norm = self._clip()
        self.updates += 1
        rate = self.learning_rate()
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step()
        return norm, rate

    def learning_rate(self) -> float:
        """Return the learning rate of the last update."""
        return learning_rate(self.config, max(1, self.updates))

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradient shards."""
        grads: list[Tensor] = []
        for shard in self.shards.values():
            if isinstance(shard.grad, DTensor):
                grads.append(shard.grad.to_local())
        return grads

    def moments(self) -> dict[str, dict[str, DTensor]]:
        """Return {"exp_avg" or "exp_avg_sq": {parameter name: moment}}. Moments are sharded like
        their parameters."""
        states: dict[str, dict[str, DTensor]] = {}
        for kind in ("exp_avg", "exp_avg_sq"):
            states[kind] = {
                name: self.inner.state[shard][kind] for name, shard in self.shards.items()
            }
        return states

    def resume(self, updates: int) -> None:
        """Set the number of updates that have been applied, after restoring a checkpoint."""
        self.updates = updates
        for state in self.inner.state.values():
            # separate tensors: AdamW increments them in place
            state["step"] = torch.tensor(float(updates))

    @torch.no_grad()
    def _clip(self) -> float:
        gradients = self.gradients()
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(total)
        norm = float(total.sqrt())
        scale = self.config.clip_grad / (norm + 1e-6)
        if self.config.clip_grad > 0 and scale < 1:
            for gradient in gradients:
                gradient.mul_(scale)
        return norm
