"""Layers that Megatron's own specification cannot express, built from a family's blocks.

Such layers apply norms after attention and MLP, omit the norms before attention and MLP, normalise
queries and keys across all heads, use a gated delta net in place of attention, or split gated
attention across more ranks than there are key heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import megatron.core.models.gpt.gpt_layer_specs as layer_specs
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.mcore.delta_net import GatedDeltaNet
from hybridflow.mcore.fused_experts import FusedExpertsMlp
from hybridflow.models import Family
from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.fused_experts import FusedExperts
from hybridflow.models.layout import Coordinates


def block_spec(family: Family, config: TransformerConfig, at: Coordinates) -> Any:
    """Return Megatron's layer spec for the (virtual) stage with the coordinates `at`, adapted to
    the blocks of its layers.
    """
    stage = at.vpp_rank if at.vpp_size > 1 else None
    spec = layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, vp_stage=stage
    )
    decoder = getattr(family, "backbone", family)  # unwraps a scalar head
    if isinstance(decoder, Decoder):
        layers = at.layers(decoder.num_layers)
        spec.layer_specs = [
            _adapted(one, decoder.attention(layer), decoder.mlp(layer))
            for one, layer in zip(spec.layer_specs, layers, strict=True)
        ]
    return spec


def head_spec(decoder: Decoder, config: TransformerConfig, at: Coordinates) -> ModuleSpec:
    """Return the spec of a multi-token-prediction head's transformer layer. Called on the last
    stage.

    As in Megatron (gpt_layer_specs.py:703), the spec of the model's last layer is used.
    """
    stage = at.vpp_rank if at.vpp_size > 1 else None
    spec = layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, vp_stage=stage
    )
    layer = decoder.num_layers
    return _adapted(spec.layer_specs[-1], decoder.attention(layer), decoder.mlp(layer))


def _adapted(spec: ModuleSpec, attention: Block, mlp: Block) -> ModuleSpec:
    """Return `spec` adapted to a layer with these blocks, or `spec` itself if it already fits."""
    # Megatron's specification is shared by all layers
    layer = copy.deepcopy(spec)
    parts = layer.submodules
    after = [False, False]
    is_changed = False
    if isinstance(attention, GroupedAttention):
        inner = parts.self_attention.submodules
        after[0] = bool(attention.norms.after)
        if not attention.norms.before:
            inner.linear_qkv = layer_specs.TESpecProvider().column_parallel_linear()
            is_changed = True
        if attention.qk_norm and attention.wide_norm:
            inner.q_layernorm, inner.k_layernorm = WideQueryNorm, WideKeyNorm
            is_changed = True
        if attention.output_gate:
            parts.self_attention.module = GatedSelfAttention
            is_changed = True
    if isinstance(attention, DeltaNet):
        parts.self_attention = ModuleSpec(GatedDeltaNet, params={"block": attention})
        is_changed = True
    if isinstance(mlp, DenseMlp):
        after[1] = bool(mlp.norms.after)
        if not mlp.norms.before:
            linear = layer_specs.TESpecProvider().column_parallel_linear()
            _submodules(parts.mlp).linear_fc1 = linear
            is_changed = True
    if isinstance(mlp, FusedExperts):
        _submodules(parts.mlp).experts = ModuleSpec(
            FusedExpertsMlp, params={"alpha": mlp.alpha, "limit": mlp.limit}
        )
        is_changed = True
    if any(after):
        layer.module = LayerWithNormsAfter
        layer.params = {**layer.params, "after": tuple(after)}
        is_changed = True
    return layer if is_changed else spec


def _submodules(part: Any) -> Any:
    """Return the submodules of a part of a layer's spec. Megatron 0.16 describes the part by a
    ModuleSpec, and 0.19 by a partial of its class."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


class LayerWithNormsAfter(TransformerLayer):
    """A Megatron layer that normalises the output of attention, the MLP, or both before adding the
    residual.

    The norms are named `post_self_attn_layernorm` and `post_mlp_layernorm`.
    """

    def __init__(self, *args: Any, after: tuple[bool, bool], **kwargs: Any) -> None:
        """`after` contains two flags: add a norm after attention, and after the MLP."""
        super().__init__(*args, **kwargs)
        names = (("post_self_attn_layernorm", "self_attn_bda"), ("post_mlp_layernorm", "mlp_bda"))
        for (name, add), is_there in zip(names, after, strict=True):
            if is_there:
                norm = layer_specs.TESpecProvider().layer_norm()(
                    config=self.config,
                    hidden_size=self.config.hidden_size,
                    eps=self.config.layernorm_epsilon,
                )
                setattr(self, name, norm)
                setattr(self, add, _normed(norm, getattr(self, add)))


def _normed(norm: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `get_bias_dropout_add` so that the block's output is normalised before it is
    added."""

    def get_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = original(training, fused)

        def normed_add(
            output: tuple[Tensor, Tensor | None], residual: Tensor, share: float
        ) -> Tensor:
            x, bias = output
            summed: Tensor = add((norm(x if bias is None else x + bias), None), residual, share)
            return summed

        return normed_add

    return get_add


class GatedSelfAttention(SelfAttention):
    """Attention with an output gate.

    If there are fewer key heads than tensor-parallel ranks, Megatron 0.16 selects the rank's
    queries, but not the matching gates (attention.py:1458). This class also selects the gates.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's query, key, value and gate [s, b, heads, head size]."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        mine = query.shape[2]
        first = parallel_state.get_tensor_model_parallel_rank() * mine % gate.shape[2]
        return query, key, value, gate[:, :, first : first + mine]


class WideNorm(nn.Module):
    """RMS norm across all heads of a token, which are sharded across the tensor-parallel ranks.

    Every rank stores the full weight, and applies the slice that belongs to its heads. Megatron
    sums the gradients of `q_layernorm` and `k_layernorm` across these ranks
    (finalize_model_grads.py).
    """

    heads = ""  # the field of Megatron's config that contains the number of heads

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, **_: Any) -> None:
        """`hidden_size` is the size of a single head."""
        super().__init__()
        self.eps = eps
        self.width = hidden_size * int(getattr(config, self.heads))
        self.weight = nn.Parameter(torch.ones(self.width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, of shape [s, b, this rank's heads, head size]."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        flat = x.flatten(-2).float()
        # with fewer key heads than ranks, several ranks share a head
        copies = flat.shape[-1] * size // self.width
        first = parallel_state.get_tensor_model_parallel_rank() // copies * flat.shape[-1]
        squares = flat.square().sum(-1, keepdim=True)
        if size > 1:
            # every rank's output depends on every rank's sum
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares)
            )
        scale = (squares / (copies * self.width) + self.eps).rsqrt()
        weight = self.weight[first : first + flat.shape[-1]]
        return ((flat * scale).to(x.dtype) * weight).view(x.shape)


class WideQueryNorm(WideNorm):
    """RMS norm across all query heads."""

    heads = "num_attention_heads"


class WideKeyNorm(WideNorm):
    """RMS norm across all key heads."""

    heads = "num_query_groups"


def check_windows(family: Family, parallel: ParallelConfig) -> None:
    """Raise ModelError if Transformer Engine does not support the family's sliding windows in this
    layout."""
    if parallel.context > 1 and "window_size" in family.megatron_config():
        # its context parallelism over packed samples ("p2p") does not support windows
        raise ModelError(
            f"actor.parallel.context={parallel.context}: Transformer Engine does not support "
            "sliding windows over packed samples with context parallelism; set it to 1"
        )


def scale_embeddings(model: Any, scale: float) -> None:
    """Multiply the first stage's embeddings by `scale`, rounded to their dtype as in
    transformers."""

    def scaled(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
        return output * torch.tensor(scale, dtype=output.dtype)

    if scale != 1.0:
        model.embedding.register_forward_hook(scaled)
