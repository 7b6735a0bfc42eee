"""The [hidden -> 1] linear that replaces the output layer on the last stage of a critic or reward
model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


class ScalarOutput(torch.nn.Module):
    """A linear with the call signature of the ColumnParallelLinear that it replaces. It is
    replicated on every tensor-parallel rank, which computes all values or, under sequence
    parallelism, the values for its share of the sequence.
    """

    def __init__(
        self,
        hidden: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if bias else None
        for parameter in self.parameters():
            # each rank sees only its share of the sequence; finalize_model_grads.py:354 then sums
            # the gradients
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """Map [s (across ranks), b, hidden] to [s, b, 1] in fp32, equal on all tensor-parallel
        ranks.

        The other arguments are required by Megatron and ignored.
        """
        values = F.linear(hidden_states, self.weight, self.bias).float()
        if self.sequence_parallel:
            # all ranks compute the same loss from the gathered values, so each keeps its own slice
            # of the gradient unreduced
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def replace_output_layer(model: GPTModel, hidden: int, bias: bool) -> None:
    """Replace the stage's output layer, if it has one, with a scalar head."""
    if model.post_process:
        old = model.output_layer.weight
        config = model.config
        model.output_layer = ScalarOutput(
            hidden, bias, old.dtype, old.device, config.sequence_parallel
        )
