"""GLM-4.5 (mixture of experts): grouped-query attention with biases, half-rotary, DeepSeek's router and shared
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.sigmoid_router import ROUTER_FIXED, ROUTER_UNUSED, sigmoid_experts, sigmoid_router_config


class Glm4Moe(Decoder):
    """The map for a `glm4_moe` config. GLM-4.5 has norms on queries and keys, GLM-4.5-Air has none (`use_qk_norm`)."""

    architecture = "Glm4MoeForCausalLM"
    positions, partial = 131072, 0.5
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "moe_intermediate_size": REQUIRED,
            "n_routed_experts": REQUIRED,
            "num_experts_per_tok": REQUIRED,
            "num_key_value_heads": 8,
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "attention_bias": False,
            "use_qk_norm": False,
        },
        fixed=ROUTER_FIXED,
        unused=ROUTER_UNUSED | {"partial_rotary_factor"},  # read by `Rotary`
        aliases={"num_local_experts": "n_routed_experts"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.qkv_bias, self.qk_norm = bool(self.values["attention_bias"]), bool(self.values["use_qk_norm"])
        self.router = sigmoid_router_config(self.values)

    def attention(self, layer: int) -> Block:
        """Grouped queries; biases and head norms as the config says."""
        sizes = (self.hidden, self.heads, self.groups, self.head_dim)
        return GroupedAttention(*sizes, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm)

    def mlp(self, layer: int) -> Block:
        """A gated MLP in the first layers, then experts."""
        if layer < int(self.values["first_k_dense_replace"]):
            return DenseMlp(self.hidden, int(self.values["intermediate_size"]))
        return sigmoid_experts(self.values)

    def megatron_config(self) -> dict[str, Any]:
        """The decoder's arguments and the sigmoid router's."""
        config = super().megatron_config() | self.router
        return config | {"add_qkv_bias": self.qkv_bias, "qk_layernorm": self.qk_norm}

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """With the rotated share of each head."""
        return super().gpt_model_kwargs() | {"rotary_percent": self.rotary.share}


FAMILIES.register("glm4_moe", Glm4Moe)
