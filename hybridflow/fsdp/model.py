"""A transformers model, sharded by FSDP2, that returns log-probs instead of logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridflow.algorithms.losses import TEACHER_IDS
from hybridflow.algorithms.vocab_parallel import Scoring, log_probs_and_entropy, log_probs_of_tokens
from hybridflow.errors import ModelError
from hybridflow.fsdp.packed import MicroBatch
from hybridflow.models import Family
from hybridflow.models.causal import allocate, causal_on_meta
from hybridflow.models.weights import WeightSource
from hybridflow.reshard.fsdp_layout import shard_rows

_PREFIX = "causal."


class ScoringModel(nn.Module):
    """A causal model that computes log-probs inside its forward pass, the only place where FSDP2
    gathers the output layer."""

    def __init__(self, causal: Any, alone: Any) -> None:
        """`alone` is a process group that contains only this rank, since the gathered output layer
        is not split across ranks."""
        super().__init__()
        self.causal = causal
        self.alone = alone

    def forward(
        self, micro: MicroBatch, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the [n] log-probs and, if requested, entropies of the response tokens.

        If the micro-batch has teacher tokens, also returns their log-probs [n, k].
        """
        hidden = self.causal.model(
            input_ids=micro.tokens,
            position_ids=micro.positions,
            attention_mask=micro.mask(),
            use_cache=False,
        ).last_hidden_state
        rows = hidden[0].index_select(0, micro.predict_rows)
        weight = self.causal.lm_head.weight
        tokens = micro.columns.get(TEACHER_IDS)
        log_probs, entropy = log_probs_and_entropy(
            rows, weight, micro.targets, scoring, self.alone, micro.support
        )
        if tokens is None:
            return log_probs, entropy, None
        found = log_probs_of_tokens(
            rows, weight, tokens, micro.targets, log_probs, scoring, self.alone
        )
        return log_probs, entropy, found


def build_model(
    family: Family, dtype: torch.dtype, source: WeightSource, device: torch.device
) -> ScoringModel:
    """Build this rank's shards and load them from `source`. No rank ever holds the full model.
    Collective.

    Args:
        family: the architecture.
        dtype: compute precision; shards, gradients and optimizer state are fp32.
        source: the weights to load.
        device: the device of the shards.

    Raises:
        ModelError: the parameters of transformers' model differ from the family's map.
    """
    mesh = init_device_mesh(
        device.type, (dist.get_world_size(), 1), mesh_dim_names=("data", "alone")
    )
    causal = causal_on_meta(family)
    model = ScoringModel(causal, mesh["alone"].get_group())
    precision = (
        MixedPrecisionPolicy()
        if dtype is torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    for part in (*causal.model.layers, model):
        # reshard the root too: it would otherwise keep the gathered weights of the last pass, even
        # after the shards have changed
        fully_shard(part, mesh=mesh["data"], mp_policy=precision, reshard_after_forward=True)
        assert isinstance(part, FSDPModule)
        # sum instead of average: gradients are divided by the global token count (and gloo cannot
        # average)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    allocate(causal, device)
    fill(model, family, source)
    return model


def shards(model: ScoringModel) -> dict[str, DTensor]:
    """Return the sharded parameters, keyed by Hugging Face name."""
    shards: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            shards[name.removeprefix(_PREFIX)] = parameter
    return shards


@torch.no_grad()
def fill(model: ScoringModel, family: Family, source: WeightSource) -> None:
    """Load this rank's shards from `source`. Raises ModelError if the family's map does not match
    the model."""
    tensors = family.tensors()
    held = shards(model)
    if {name: tuple(shard.shape) for name, shard in held.items()} != tensors:
        wrong = sorted(held.keys() ^ tensors.keys()) or [
            name for name in tensors if tuple(held[name].shape) != tensors[name]
        ]
        raise ModelError(
            f"transformers' {type(model.causal).__name__} and the family's map differ in "
            f"{wrong[:4]}; use actor.backend=megatron"
        )
    for name, shape in tensors.items():
        start, rows = shard_rows(shape[0], dist.get_rank(), dist.get_world_size())
        local = held[name].to_local()
        if local.shape[0] != rows:
            raise ModelError(
                f"FSDP2 assigned {local.shape[0]} rows of {name} {shape} to this rank, expected "
                f"{rows}"
            )
        if rows:
            tail = (0,) * (len(shape) - 1)
            local.copy_(source.read(name, (start, *tail), (rows, *shape[1:])))
