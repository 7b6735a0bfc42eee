"""Forward passes and training steps over packed micro-batches, under any of Megatron's pipeline
schedules.

Each pass watches for non-finite values (`losses.NonfiniteWatch`): in the gradients that enter and
leave each stage, and in the flat gradient buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms import losses
from hybridflow.algorithms.losses import OF_TEACHER, TEACHER_IDS
from hybridflow.algorithms.vocab_parallel import (
    Scoring,
    log_probs_and_entropy,
    log_probs_of_tokens,
    top_log_probs,
)
from hybridflow.mcore.model import output_weight
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import context_rank, device, gather_tokens, is_last_stage

Metrics = dict[str, tuple[Tensor, Tensor]]
# (log_probs [n], entropy [n] or None, micro-batch) -> (loss sum, count, metric sums with counts)
LossFunction = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Tensor, Metrics]]
# (micro-batch, the model's output [1, t, ...]) -> the same
OutputLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Metrics]]


class Watch(losses.NonfiniteWatch):
    """Checks one mini-batch for non-finite values, at three points in each of this rank's
    stages.
    """

    def __init__(self, num_micro_batches: int) -> None:
        super().__init__(num_micro_batches, device())

    @contextlib.contextmanager
    def stage(self, model: Any, micro_batch: int) -> Iterator[None]:
        """Context manager for a stage's forward pass. It watches the gradient that will leave the
        stage, i.e. the gradient of the embedding's output or of the received activation.
        """
        if not model.pre_process:
            self.gradient_of(model.decoder.input_tensor, micro_batch)
            yield
            return
        handle = model.embedding.register_forward_hook(
            lambda module, inputs, output: self.gradient_of(output, micro_batch)
        )
        try:
            yield
        finally:
            handle.remove()

    def report(self, chunks: Sequence[Any]) -> str:
        """Return `report_of` for the reduced gradients in the buffers of `chunks`. Collective over
        all ranks."""
        gradients = []
        for chunk in chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                gradients.append(buffer.grad_data)
        return self.report_of(gradients)


def forward(
    chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], scoring: Scoring
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute the log-probs (and entropies) of every response token, without gradients. Returns
    empty lists outside the last stage."""

    def collect(micro: MicroBatch, hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
        log_probs, entropy, _ = response_log_probs(chunks, hidden, micro, scoring)
        if entropy is None:
            return log_probs.cpu().numpy(), np.zeros(0, np.float32)
        return log_probs.cpu().numpy(), entropy.cpu().numpy()

    results = forward_outputs(chunks, micro_batches, collect)
    return [item[0] for item in results], [item[1] for item in results]


def forward_top(
    chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], scoring: Scoring, k: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute the [n, k] log-probs and token ids of the k most likely tokens at every response
    position. Returns empty lists outside the last stage."""

    def collect(micro: MicroBatch, hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
        rows, weight, group = _predicting(chunks, hidden, micro)
        values, tokens = top_log_probs(rows, weight, k, scoring, group)
        values = gather_tokens(values.t(), micro.places, micro.num_targets)
        tokens = gather_tokens(tokens.t(), micro.places, micro.num_targets)
        return values.t().cpu().numpy(), tokens.t().cpu().numpy()

    results = forward_outputs(chunks, micro_batches, collect)
    return [item[0] for item in results], [item[1] for item in results]


def backward(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    scoring: Scoring,
    watch: Watch,
    learn: Callable[[MicroBatch, Scoring], None] | None = None,
) -> Metrics:
    """Run the forward and backward passes of one mini-batch.

    Leaves the gradients in the model's buffers, reduced and divided by the global count.

    Args:
        learn: called on the last stage after each micro-batch's forward pass, to train modules on
            the hidden states of that pass (`HeadTraining.learn`).

    Returns:
        Metric sums and counts over this data-parallel rank's micro-batches; empty outside the last
        stage.
    """

    def loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        log_probs, entropy, micro = response_log_probs(chunks, hidden, micro, scoring)
        if learn is not None:
            learn(micro, scoring)
        return loss_function(log_probs, entropy, micro)

    return backward_outputs(chunks, micro_batches, loss, watch)


def forward_outputs(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    collect: Callable[[MicroBatch, Tensor], Any],
) -> list[Any]:
    """Apply `collect` to the model's output [1, t', ...] for each micro-batch, without gradients.
    Returns the results on the last stage and an empty list on the others."""
    with torch.no_grad():
        return run(chunks, micro_batches, lambda _, micro, output: collect(micro, output))


def backward_outputs(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    loss_function: OutputLoss,
    watch: Watch,
) -> Metrics:
    """Same as `backward`, for a loss on the model's full output."""

    def loss(number: int, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        total, count, metrics = loss_function(micro, output)
        watch.loss(number, total.detach())
        # clone, since the schedule scales the loss in place
        metrics = {"loss": (total.detach().clone(), count), **metrics}
        # every context-parallel rank computes the same loss, and Megatron sums the ranks' counts
        # (finalize_model_grads.py:493)
        divisor = count if context_rank() == 0 else torch.zeros_like(count)
        return total, divisor.to(total.device, torch.int), metrics

    results = run(chunks, micro_batches, loss, watch)
    merged: Metrics = {}
    zero = torch.zeros(())
    for metrics in results:
        for name, (total, count) in metrics.items():
            seen_total, seen_count = merged.get(name, (zero, zero))
            added = total.detach().float().cpu()
            merged[name] = (seen_total + added, seen_count + count.cpu())
    return merged


def response_log_probs(
    chunks: Sequence[Any], hidden: Tensor, micro: MicroBatch, scoring: Scoring
) -> tuple[Tensor, Tensor | None, MicroBatch]:
    """Compute the [n] log-probs and entropies of all response tokens of the micro-batch.

    The results are available on every tensor and context rank of the last stage. Also returns the
    micro-batch, with the policy's log-probs of the teacher tokens added if there are teacher
    tokens. `hidden` [1, t', h] is the output of the last chunk.
    """
    rows, weight, group = _predicting(chunks, hidden, micro)
    log_probs, entropy = log_probs_and_entropy(
        rows, weight, micro.targets, scoring, group, micro.support
    )
    if (tokens := micro.columns.get(TEACHER_IDS)) is not None:
        tokens = tokens if micro.places is None else tokens[micro.places]
        found = log_probs_of_tokens(rows, weight, tokens, micro.targets, log_probs, scoring, group)
        found = gather_tokens(found.t(), micro.places, micro.num_targets).t()
        micro = replace(micro, columns={**micro.columns, OF_TEACHER: found})
    if micro.places is None or entropy is None:
        return gather_tokens(log_probs, micro.places, micro.num_targets), entropy, micro
    both = gather_tokens(torch.stack([log_probs, entropy]), micro.places, micro.num_targets)
    return both[0], both[1], micro


def _predicting(
    chunks: Sequence[Any], hidden: Tensor, micro: MicroBatch
) -> tuple[Tensor, Tensor, Any]:
    """Return the [n', h] states that predict this rank's response tokens, the [v, h] output weight,
    and the tensor-parallel group."""
    rows = hidden[0].index_select(0, micro.predict_rows)
    last = chunks[-1]
    # unwrapped if not trained
    model = last.module if isinstance(last, DistributedDataParallel) else last
    return rows, output_weight(model), parallel_state.get_tensor_model_parallel_group()


def run(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    on_output: Callable[[int, MicroBatch, Tensor], Any],
    watch: Watch | None = None,
) -> list[Any]:
    """Run Megatron's pipeline schedule. Returns the results of `on_output(number, micro-batch,
    output)` in order; empty outside the last stage. If `watch` is given, backward passes are run as
    well, and `on_output` returns (loss, count, any value).
    """

    def forward_step(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        number, micro = next(iterator)
        with watch.stage(chunk.module, number) if watch else contextlib.nullcontext():
            output = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)
        if watch:
            watch.gradient_of(output, number)
        return output, lambda output, non_loss_data=False: on_output(number, micro, output)

    iterators = [iter(list(enumerate(micro_batches))) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].length,
        micro_batch_size=1,
        forward_only=watch is None,
        collect_non_loss_data=watch is None,
    )


def all_ranks_max(value: int) -> int:
    """Return the maximum over all ranks.

    All ranks must run the same number of micro-batches, since the experts' collectives span
    data-parallel ranks.
    """
    tensor = torch.tensor([value], dtype=torch.int64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def counted(loss_function: LossFunction, micro: MicroBatch) -> Tensor:
    """Return a micro-batch's loss count before any forward pass: the number of tokens, unless the
    loss defines `count`.
    """
    count = getattr(loss_function, "count", None)
    found = count(micro.lengths) if count else micro.lengths.sum()
    return torch.as_tensor(found).cpu()


def metrics_to_floats(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Convert each metric to a plain (sum, count). The driver merges these across data-parallel
    ranks."""
    if not is_last_stage():
        return {}
    return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
