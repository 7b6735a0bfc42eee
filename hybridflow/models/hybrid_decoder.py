"""Decoders with gated delta nets in most layers and gated attention in the others (Qwen3-Next,
Qwen3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, GroupedAttention
from hybridflow.models.decoder import Decoder, HeadNames
from hybridflow.models.delta_net import DeltaNet, linear_layers
from hybridflow.models.softmax_router import gated_mixture

LAYERS: Mapping[str, Any] = {
    "head_dim": 256,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FIXED: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False,), "attn_output_gate": (True,)}
# read by `Rotary`; heads for multi-token prediction, which transformers drops; the dtype of
# the recurrent state, which is computed in float32
UNUSED = frozenset(
    {
        *("partial_rotary_factor", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        "mamba_ssm_dtype",
    }
)
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_DIMS = ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")


class HybridDecoder(Decoder):
    """Base class of the families with gated delta nets.

    Attributes:
        fused: the projections of a delta net in a checkpoint (`DeltaNet.fused`).
        linear: which layers have a delta net.
    """

    fused = False
    partial = 0.25
    qk_norm = True

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        values = self.values
        interval = int(values["full_attention_interval"])
        self.linear = linear_layers(values["layer_types"], interval, self.num_layers)
        self.key_heads, self.value_heads = (int(values[name]) for name in _HEADS)
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"linear_num_value_heads={self.value_heads} is not a multiple of "
                f"linear_num_key_heads={self.key_heads}; change one of them"
            )

    def num_prediction_heads(self) -> int:
        """Return `mtp_num_hidden_layers`. The default is 1, because Qwen3-Next's configs do not
        declare the head that the checkpoint contains. Several heads would share a projection, which
        is not supported.
        """
        count = int(self.hf.get("mtp_num_hidden_layers", 1))
        return count if count == 1 and not self.hf.get("mtp_use_dedicated_embeddings") else 0

    def head_names(self, head: int) -> HeadNames:
        """Return the checkpoint names of the prediction head."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return HeadNames(f"mtp.layers.{head}.", *(f"mtp.{name}" for name in names))

    def aliases(self) -> dict[str, str]:
        """Return an empty mapping, because the head duplicates neither the embedding nor the output
        head.
        """
        return {}

    def attention(self, layer: int) -> Block:
        """Return the delta net or the gated attention of a layer."""
        if layer < self.num_layers and self.linear[layer]:
            key, value, kernel = (int(self.values[name]) for name in _DIMS)
            heads = (self.key_heads, self.value_heads)
            return DeltaNet(self.hidden, *heads, key, value, kernel, self.fused)
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True, output_gate=True
        )

    def kind_layers(self) -> list[int]:
        """Return the index of the first layer of each kind."""
        kinds: dict[tuple[Block, Block], int] = {}
        for layer in range(self.num_layers):
            kinds.setdefault((self.attention(layer), self.mlp(layer)), layer)
        return list(kinds.values())

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments for TransformerConfig."""
        return super().megatron_config() | {
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            # the layers of a checkpoint differ (transformer_block.py:839)
            "linear_attention_freq": [int(linear) for linear in self.linear],
        }

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments for GPTModel, including the rotated fraction of each
        head."""
        return super().gpt_model_kwargs() | {"rotary_percent": self.rotary.share}


class HybridMixture(HybridDecoder):
    """Base class of the families with gated delta nets, routed experts and a gated shared
    expert.
    """

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        values = self.values
        only = values.get("mlp_only_layers") or []
        step = int(values.get("decoder_sparse_step", 1))
        if step < 1:
            raise ModelError(f"decoder_sparse_step={step} is not supported; set it to 1")
        self.sparse = [
            layer not in only and (layer + 1) % step == 0 for layer in range(self.num_layers)
        ]
        if not any(self.sparse):
            raise ModelError(
                f"mlp_only_layers={only} and decoder_sparse_step={step} leave no layer with "
                "experts; change one of them"
            )
        self.experts, router = gated_mixture(
            self.hidden, values, renormalised=bool(values.get("norm_topk_prob", True))
        )
        self.router = router | {"moe_layer_freq": [int(sparse) for sparse in self.sparse]}

    def mlp(self, layer: int) -> Block:
        """Return the experts of a layer, or its gated MLP."""
        if layer < self.num_layers and not self.sparse[layer]:
            return super().mlp(layer)
        return self.experts
