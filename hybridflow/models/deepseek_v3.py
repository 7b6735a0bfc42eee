"""DeepSeek-V3 and what is built like it (Moonlight, Kimi-K2): latent attention, sigmoid router with expert bias, shared
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, DenseMlp
from hybridflow.models.decoder import Decoder
from hybridflow.models.mla import LatentAttention
from hybridflow.models.sigmoid_router import sigmoid_experts, sigmoid_router_config

_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")


class DeepseekV3(Decoder):
    """The map for a `deepseek_v3` or `kimi_k2` config. The first `first_k_dense_replace` layers have a dense MLP."""

    architecture = "DeepseekV3ForCausalLM"
    required = (*Decoder.required, *_LATENT, *_EXPERTS)

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if hf.get("attention_bias"):
            raise ModelError("deepseek_v3 with attention_bias has no parameter map; published models have none")
        if int(hf.get("moe_layer_freq") or 1) != 1:
            raise ModelError(
                "deepseek_v3 with moe_layer_freq other than 1 has no parameter map; published models have 1"
            )
        self.num_dense = int(hf.get("first_k_dense_replace") or 0)

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        hf, q_rank = self.hf, self.hf.get("q_lora_rank")
        return LatentAttention(
            self.hidden,
            self.heads,
            q_rank=None if q_rank is None else int(q_rank),
            kv_rank=int(hf["kv_lora_rank"]),
            nope_dim=int(hf["qk_nope_head_dim"]),
            rope_dim=int(hf["qk_rope_head_dim"]),
            v_dim=int(hf["v_head_dim"]),
        )

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        if layer < self.num_dense:
            return DenseMlp(self.hidden, int(self.hf["intermediate_size"]))
        return sigmoid_experts(self.hf, self.hidden)

    def megatron_config(self) -> dict[str, Any]:
        """See `Decoder`; these are arguments of MLATransformerConfig."""
        hf, q_rank = self.hf, self.hf.get("q_lora_rank")
        config = super().megatron_config() | sigmoid_router_config(hf, self.num_layers)
        config |= {
            "multi_latent_attention": True,
            "num_query_groups": self.heads,
            "kv_channels": int(hf["v_head_dim"]),
            "qk_layernorm": True,
            "q_lora_rank": None if q_rank is None else int(q_rank),
            "kv_lora_rank": int(hf["kv_lora_rank"]),
            "qk_head_dim": int(hf["qk_nope_head_dim"]),
            "qk_pos_emb_head_dim": int(hf["qk_rope_head_dim"]),
            "v_head_dim": int(hf["v_head_dim"]),
            "rotary_base": float(self.rope("rope_theta", 10000.0)),
            "rope_type": "rope",
        }
        if self.rope("rope_type", self.rope("type")) == "yarn":
            config |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": float(self.rope("factor", 40.0)),
                "original_max_position_embeddings": int(self.rope("original_max_position_embeddings", 4096)),
                "beta_fast": float(self.rope("beta_fast", 32.0)),
                "beta_slow": float(self.rope("beta_slow", 1.0)),
                "mscale": float(self.rope("mscale", 1.0)),
                "mscale_all_dim": float(self.rope("mscale_all_dim", 0.0)),
            }
        return config
