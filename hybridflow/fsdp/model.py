"""A transformers model, sharded by FSDP2, that returns log-probs instead of logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridflow.algorithms.losses import TEACHER_IDS
from hybridflow.algorithms.vocab_parallel import Scoring, log_probs_and_entropy, log_probs_of_tokens
from hybridflow.errors import ModelError
from hybridflow.fsdp.lora import Adapters
from hybridflow.fsdp.packed import MicroBatch
from hybridflow.models import Family
from hybridflow.models.causal import allocate, causal_on_meta, checkpoint_views
from hybridflow.models.lora import AdapterMap
from hybridflow.models.weights import WeightSource
from hybridflow.reshard.fsdp_layout import fsdp_rows, shard_rows

_PREFIX = "causal."


class ScoringModel(nn.Module):
    """A causal model that computes log-probs inside its forward pass, the only place where FSDP2
    gathers the output layer."""

    def __init__(self, causal: Any, alone: Any, adapters: Adapters | None = None) -> None:
        """`alone` is a process group with only this rank. It is used for log-probs, because the
        gathered output layer is not sharded. `adapters` are attached to `causal`.
        """
        super().__init__()
        self.causal = causal
        self.alone = alone
        self.adapters = adapters

    def forward(
        self, micro: MicroBatch, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
    family: Family,
    dtype: torch.dtype,
    source: WeightSource,
    device: torch.device,
    recompute: bool = False,
    lora: AdapterMap | None = None,
) -> ScoringModel:
    """Build this rank's shards and load them from `source`. No rank ever holds the full model.
    Collective.

    Args:
        family: the architecture.
        dtype: compute precision; shards, gradients and optimizer state are fp32.
        source: the weights to load.
        device: the device of the shards.
        recompute: if True, only the layers' inputs are stored for the backward pass, and each
            layer's activations are recomputed.
        lora: adapters to train instead of the weights.

    Raises:
        ModelError: the parameters of transformers' model differ from the family's map, or the model
            does not support these adapters.
    """
    mesh = init_device_mesh(
        device.type, (dist.get_world_size(), 1), mesh_dim_names=("data", "alone")
    )
    causal = causal_on_meta(family)
    if recompute:
        # without dropout, the second pass needs no random state
        causal.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    adapters = Adapters(lora, causal) if lora is not None else None
    model = ScoringModel(causal, mesh["alone"].get_group(), adapters)
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
    if model.adapters is not None:
        rows = fsdp_rows(model.adapters.map.tensors(), dist.get_rank(), dist.get_world_size())
        model.adapters.fill(local_tensors(model, weights_and_factors(model)[1]), rows)
    return model


def shards(model: ScoringModel) -> dict[str, DTensor]:
    """Return the sharded parameters, keyed by transformers' names, which match the names in
    checkpoints, except that a layer's experts are stacked. Adapter factors are included.
    """
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
    base, _ = weights_and_factors(model)
    whole = _shapes(model, base)
    if whole != tensors:
        wrong = sorted(whole.keys() ^ tensors.keys()) or [
            name for name in tensors if whole[name] != tensors[name]
        ]
        raise ModelError(
            f"transformers' {type(model.causal).__name__} and the family's map differ in "
            f"{wrong[:4]}; use actor.backend=megatron"
        )
    held = local_tensors(model, base)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, (start, rows) in fsdp_rows(tensors, rank, ranks).items():
        shape = tensors[name]
        mine = len(held[name]) if name in held else 0
        if mine != rows:
            raise ModelError(
                f"FSDP2 assigned {mine} rows of {name} {shape} to this rank, expected {rows}"
            )
        if rows:
            tail = (0,) * (len(shape) - 1)
            held[name].copy_(source.read(name, (start, *tail), (rows, *shape[1:])))


def weights_and_factors(model: ScoringModel) -> tuple[dict[str, DTensor], dict[str, DTensor]]:
    """Return `shards`, split into weights and adapter factors."""
    weights: dict[str, DTensor] = {}
    factors: dict[str, DTensor] = {}
    for name, shard in shards(model).items():
        (factors if Adapters.is_factor(name) else weights)[name] = shard
    return weights, factors


def _shapes(model: ScoringModel, base: Mapping[str, DTensor]) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name: shape} of the weights as stored in checkpoints."""
    whole: dict[str, tuple[int, ...]] = {}
    for name, shard in base.items():
        for view_name, view in _views(model, name, torch.empty(shard.shape, device="meta"), 0):
            whole[view_name] = tuple(view.shape)
    return whole


def local_tensors(model: ScoringModel, tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Return this rank's part of `tensors` as views, keyed by Hugging Face name.

    `tensors` must have the names and the sharding of `shards`. Tensors without rows on this rank
    are omitted.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local().detach()
        if local.numel():
            first, _ = shard_rows(tensor.shape[0], dist.get_rank(), dist.get_world_size())
            found |= dict(_views(model, name, local, first))
    return found


def _views(
    model: ScoringModel, name: str, tensor: Tensor, first: int
) -> Iterator[tuple[str, Tensor]]:
    if model.adapters is not None and model.adapters.is_factor(name):
        return model.adapters.views(name, tensor, first)
    return checkpoint_views(model.causal.config.model_type, name, tensor, first)
