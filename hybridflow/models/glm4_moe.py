"""GLM-4.5 (mixture of experts): grouped-query attention with biases, half-rotary, DeepSeek's router and shared
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.sigmoid_router import sigmoid_experts, sigmoid_router_config


class Glm4Moe(Decoder):
    """The map for a `glm4_moe` config. GLM-4.5 has norms on queries and keys, GLM-4.5-Air has none (`use_qk_norm`)."""

    architecture = "Glm4MoeForCausalLM"
    required = (
        *Decoder.required,
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.num_dense = int(hf.get("first_k_dense_replace") or 0)
        self.qkv_bias, self.qk_norm = bool(hf.get("attention_bias")), bool(hf.get("use_qk_norm"))

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm
        )

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        if layer < self.num_dense:
            return DenseMlp(self.hidden, int(self.hf["intermediate_size"]))
        return sigmoid_experts(self.hf, self.hidden)

    def megatron_config(self) -> dict[str, Any]:
        """See `Decoder`."""
        config = super().megatron_config() | sigmoid_router_config(self.hf, self.num_layers)
        return config | {"add_qkv_bias": self.qkv_bias, "qk_layernorm": self.qk_norm}

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """See `Decoder`."""
        return super().gpt_model_kwargs() | {"rotary_percent": float(self.rope("partial_rotary_factor", 0.5))}
