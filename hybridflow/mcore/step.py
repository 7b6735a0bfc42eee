"""Forward passes and training steps over packed micro-batches, under whatever pipeline schedule Megatron chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import device, is_last_stage
from hybridflow.mcore.vocab_parallel import log_probs_and_entropy

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]
# (log_probs [n], entropy [n] or None, micro-batch) -> (loss sum, count, metric sums with counts)
LossFunction = Callable[[torch.Tensor, torch.Tensor | None, MicroBatch], tuple[torch.Tensor, torch.Tensor, Metrics]]
# (micro-batch, the model's output [1, t, ...]) -> the same
OutputLoss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, Metrics]]


def forward(
    model: Any, micro_batches: Sequence[MicroBatch], *, vocab_size: int, temperature: float, with_entropy: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probs (and entropies) of every response token, without gradient. On the last stage; empty lists elsewhere."""

    def collect(micro: MicroBatch, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        log_probs, entropy = _response_log_probs(logits, micro, vocab_size, temperature, with_entropy)
        return log_probs.cpu().numpy(), entropy.cpu().numpy() if entropy is not None else np.zeros(0, np.float32)

    results = forward_outputs(model, micro_batches, collect)
    return [item[0] for item in results], [item[1] for item in results]


def backward(
    model: Any, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, vocab_size: int, temperature: float, with_entropy: bool
) -> Metrics:
    """Forward and backward of one mini-batch; gradients are left reduced and divided by the global count in the model's buffers.

    Returns:
        Metric sums and counts over this data-parallel rank's micro-batches, on the last stage; empty elsewhere.
    """

    def loss(micro: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        log_probs, entropy = _response_log_probs(logits, micro, vocab_size, temperature, with_entropy)
        return loss_function(log_probs, entropy, micro)

    return backward_outputs(model, micro_batches, loss)


def forward_outputs(model: Any, micro_batches: Sequence[MicroBatch], collect: Callable[[MicroBatch, torch.Tensor], Any]) -> list[Any]:
    """What `collect` makes of the model's output [1, t, ...] for each micro-batch, without gradient, on the last stage; else empty."""
    with torch.no_grad():
        return _run(model, micro_batches, collect, forward_only=True)


def backward_outputs(model: Any, micro_batches: Sequence[MicroBatch], loss_function: OutputLoss) -> Metrics:
    """`backward` for a loss of the model's whole output."""

    def loss(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        total, count, metrics = loss_function(micro, output)
        # a clone: the schedule scales the loss it is given in place
        metrics = {"loss": (total.detach().clone(), count), **metrics}
        return total, count.to(total.device, torch.int), metrics

    results = _run(model, micro_batches, loss, forward_only=False)
    merged: Metrics = {}
    for metrics in results:
        for name, (total, count) in metrics.items():
            seen_total, seen_count = merged.get(name, (torch.zeros(()), torch.zeros(())))
            merged[name] = (seen_total + total.detach().float().cpu(), seen_count + count.cpu())
    return merged


def _response_log_probs(
    logits: torch.Tensor, micro: MicroBatch, vocab_size: int, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    group = parallel_state.get_tensor_model_parallel_group()
    rows = logits[0].index_select(0, micro.predict_rows)
    return log_probs_and_entropy(
        rows, micro.targets, vocab_size=vocab_size, temperature=temperature, group=group, with_entropy=with_entropy
    )


def _run(
    model: Any, micro_batches: Sequence[MicroBatch], on_logits: Callable[[MicroBatch, torch.Tensor], Any], forward_only: bool
) -> list[Any]:
    """Run Megatron's schedule; what `on_logits` returns for each micro-batch comes back on the last stage."""

    def forward_step(iterator: Any, stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro: MicroBatch = next(iterator)
        output = stage(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)
        return output, lambda logits, non_loss_data=False: on_logits(micro, logits)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def all_ranks_max(value: int) -> int:
    """The largest value over the world: ranks must run equally many micro-batches, since experts' collectives span data-parallel ranks."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def metrics_to_floats(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """(sum, count) of each metric as plain numbers, for the driver to merge over data-parallel ranks."""
    return {name: (float(total), float(count)) for name, (total, count) in metrics.items()} if is_last_stage() else {}
