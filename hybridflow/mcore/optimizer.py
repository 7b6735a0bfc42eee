"""Megatron's optimizer, with fixes for torch's AdamW, which is used if neither Transformer Engine
nor Apex is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hybridflow.config.schema import OptimConfig, ParallelConfig
from hybridflow.device.platform import Platform
from hybridflow.errors import ModelError
from hybridflow.mcore import bootstrap  # before megatron

STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _check_precision_aware(
    config: OptimConfig, parallel: ParallelConfig, dtype: torch.dtype
) -> None:
    if not config.precision_aware:
        return
    key = "optim.precision_aware=true"
    if not bootstrap.HAVE_TRANSFORMER_ENGINE:
        raise ModelError(
            f"{key} requires Transformer Engine's FusedAdam, which is not in use here "
            f"({bootstrap.backend_name()}); set it to false, or build the GPU environment on a "
            "machine with nvcc (make setup LANE=gpu)"
        )
    if dtype is not torch.bfloat16:
        raise ModelError(
            f"{key} requires model.dtype=bfloat16, because float32 weights have no separate main "
            "weights; set model.dtype=bfloat16 or optim.precision_aware=false"
        )
    if not parallel.distributed_optimizer:
        raise ModelError(f"{key} requires parallel.distributed_optimizer=true")


class Optimizer:
    """The optimizer and its learning-rate schedule, stepped together."""

    def __init__(
        self,
        chunks: Sequence[Any],
        config: OptimConfig,
        parallel: ParallelConfig,
        dtype: torch.dtype,
    ) -> None:
        """`chunks` must be wrapped for training (`model.wrap_for_training`)."""
        self.chunks = chunks
        self.config = config
        _check_precision_aware(config, parallel, dtype)
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
                use_distributed_optimizer=parallel.distributed_optimizer,
                overlap_param_gather=parallel.overlap_param_gather,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_precision_aware_optimizer=config.precision_aware,
                # checkpoints store whole main weights, which every layout can read
                store_param_remainders=False,
                **{key: getattr(torch, getattr(config, key)) for key in STATE_DTYPES},
            ),
            list(chunks),
            use_gloo_process_groups=Platform.detect().kind == "cpu",
        )
        decay_steps = config.lr_decay_steps or max(config.lr_warmup_steps + 1, 1_000_000_000)
        self.scheduler = OptimizerParamScheduler(
            self.inner,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr if config.lr_decay_style != "constant" else 0.0,
            lr_warmup_steps=config.lr_warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=config.lr_decay_style,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        chunks[0].config.grad_scale_func = self.inner.scale_loss
        prime_adam_state(self.inner)

    def zero_grad(self) -> None:
        """Clear the gradients. Called before each mini-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self) -> tuple[bool, float, float]:
        """Clip the gradients and apply the update.

        Returns (applied, gradient norm before clipping, learning rate used).

        Gradients must be finite: Megatron checks for NaN only if it scales the loss, while
        `losses.NonfiniteWatch` always checks.
        """
        # the first update of a warm-up has rate lr / warmup, not 0
        self.scheduler.step(increment=1)
        rate = self.learning_rate()
        found, norm, _ = self.inner.step()
        norm = float(norm) if norm is not None else float("nan")
        return bool(found), norm, rate

    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return (
            float(self.inner.param_groups[0]["lr"]) if self.inner.param_groups else self.config.lr
        )


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the inner optimizers. Dense and expert parameters have separate inner optimizers.
    Megatron's stubs, on ranks without dense or without expert parameters, are skipped.
    """
    optimizers: list[Any] = []
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(inner, "is_stub_optimizer", False):
            optimizers.append(inner)
    return optimizers


def prime_adam_state(optimizer: Any) -> None:
    """Allocate Adam's state before the first step.

    This allows a fresh optimizer to be saved or restored, and satisfies the assertion on 'step' in
    distrib_optimizer.py:641.
    """
    for inner in inner_optimizers(optimizer):
        counts_in_state = _counts_in_state(inner.optimizer)
        for group in inner.optimizer.param_groups:
            if not counts_in_state:
                group.setdefault("step", 0)
            for parameter in group["params"]:
                if inner.optimizer.state.get(parameter):
                    continue
                # main weights and moments in their own dtypes, with their scales
                if is_precision_aware(inner):
                    inner.optimizer.initialize_state(parameter, False)
                else:
                    zeros = torch.zeros_like(parameter)
                    step = {"step": torch.tensor(0.0)} if counts_in_state else {}
                    inner.optimizer.state[parameter] = step | {
                        "exp_avg": zeros,
                        "exp_avg_sq": zeros.clone(),
                    }


def is_precision_aware(inner: Any) -> bool:
    """Return True if Adam stores the main weights.

    In that case `_get_main_param_and_optimizer_states` may return copies.
    """
    return bool(getattr(inner.config, "use_precision_aware_optimizer", False))


def adam_step(optimizer: Any) -> int:
    """Return the number of updates so far."""
    for inner in inner_optimizers(optimizer):
        counts_in_state = _counts_in_state(inner.optimizer)
        holders = (
            inner.optimizer.state.values() if counts_in_state else inner.optimizer.param_groups
        )
        if counts := [holder["step"] for holder in holders if "step" in holder]:
            return int(counts[0])
    return 0


def set_adam_step(optimizer: Any, step: int) -> None:
    """Set the number of updates to `step`. Every parameter gets a separate step tensor.
    distrib_optimizer.py:785 shares one tensor between all states, and torch's AdamW then increments
    it once per parameter. The results would be silently wrong (by 5e-4 after a resume).
    """
    for inner in inner_optimizers(optimizer):
        if _counts_in_state(inner.optimizer):
            for state in inner.optimizer.state.values():
                state["step"] = torch.tensor(float(step))
        else:
            for group in inner.optimizer.param_groups:
                group["step"] = step


def _counts_in_state(adam: Any) -> bool:
    """Return True if this Adam stores the step count in each parameter's state, as torch's Adam
    does.

    Transformer Engine's and Apex's Adam store it in the parameter group, and would treat a `step`
    in the state as another moment.
    """
    return isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))
