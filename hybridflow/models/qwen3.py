"""Qwen3 and Qwen3-MoE: grouped-query attention with per-head q/k norm, SwiGLU, softmax router with renormalised
top-k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, DenseMlp, Experts, GroupedAttention
from hybridflow.models.decoder import Decoder


class Qwen3(Decoder):
    """The map for one Qwen3 config, dense (`qwen3`) or mixture of experts (`qwen3_moe`, every layer sparse)."""

    required = (*Decoder.required, "num_key_value_heads")

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.is_moe = hf["model_type"] == "qwen3_moe"
        self.architecture = "Qwen3MoeForCausalLM" if self.is_moe else "Qwen3ForCausalLM"
        # transformers 5 writes num_local_experts, published configs have num_experts
        self.num_experts = int(hf.get("num_experts") or hf["num_local_experts"]) if self.is_moe else 0
        self.ffn = int(hf["moe_intermediate_size"] if self.is_moe else hf["intermediate_size"])
        if self.is_moe and (hf.get("mlp_only_layers") or int(hf.get("decoder_sparse_step", 1)) != 1):
            raise ModelError(
                "qwen3_moe with dense layers in between (mlp_only_layers, decoder_sparse_step) has no parameter map yet"
            )

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True)

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        return Experts(self.hidden, self.ffn, self.num_experts) if self.is_moe else DenseMlp(self.hidden, self.ffn)

    def megatron_config(self) -> dict[str, Any]:
        """See `Decoder`."""
        config = super().megatron_config() | {
            "qk_layernorm": True,
            "ffn_hidden_size": int(self.hf.get("intermediate_size") or self.ffn),
        }
        if self.is_moe:
            config |= {
                "num_moe_experts": self.num_experts,
                "moe_router_topk": int(self.hf["num_experts_per_tok"]),
                "moe_ffn_hidden_size": self.ffn,
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": "fp32",
                # norm_topk_prob renormalises the chosen probabilities, which equals a softmax over the chosen logits
                # alone
                "moe_router_pre_softmax": not self.hf.get("norm_topk_prob", False),
            }
        return config
