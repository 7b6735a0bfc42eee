"""Checks for non-finite values (`algorithms.nonfinite`) in a Megatron model: in the gradients that
enter and leave each stage, and in the flat gradient buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms import nonfinite
from hybridflow.mcore.parallel import device


class Watch(nonfinite.Watch):
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
        return self.report_of(
            buffer.grad_data
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
