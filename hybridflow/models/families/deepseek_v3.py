"""DeepSeek-V3 and models with the same architecture (Moonlight).

They have latent attention, a sigmoid router with expert bias, and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.mla import LatentAttention
from hybridflow.models.sigmoid_router import (
    EXPERT_ALIASES,
    LAYER_SIZES,
    ROUTER_FIXED,
    ROUTER_UNUSED,
    SigmoidDecoder,
)


class DeepseekV3(SigmoidDecoder):
    """Parameter map of a `deepseek_v3` config."""

    architecture = "DeepseekV3ForCausalLM"
    positions = 4096
    # transformers does not pass rms_norm_eps to the norms of the latents
    latent_norm_eps: float | None = 1e-6
    fields = Fields(
        used={
            **LAYER_SIZES,
            "kv_lora_rank": REQUIRED,
            "qk_nope_head_dim": REQUIRED,
            "qk_rope_head_dim": REQUIRED,
            "v_head_dim": REQUIRED,
            "q_lora_rank": 1536,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
        },
        # moe_layer_freq, scoring_func and topk_method occur only in the published configs
        fixed={
            **ROUTER_FIXED,
            "attention_bias": (False,),
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        unused=ROUTER_UNUSED | {"pretraining_tp"},
        nullable=frozenset({"q_lora_rank"}),
        aliases=EXPERT_ALIASES,
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if self.groups != self.heads:
            raise ModelError(
                f"num_key_value_heads={self.groups} must equal num_attention_heads={self.heads}: "
                "latent attention has one key and one value per head"
            )
        rank = self.values["q_lora_rank"]
        self.q_rank = None if rank is None else int(rank)

    @property
    def rotary_width(self) -> int:
        """Width of the rotary part of a head's query and key."""
        return int(self.values["qk_rope_head_dim"])

    def attention(self, layer: int) -> Block:
        """Return a latent attention block."""
        return LatentAttention(
            self.hidden,
            self.heads,
            q_rank=self.q_rank,
            kv_rank=int(self.values["kv_lora_rank"]),
            nope_dim=int(self.values["qk_nope_head_dim"]),
            rope_dim=int(self.values["qk_rope_head_dim"]),
            v_dim=int(self.values["v_head_dim"]),
        )

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments of MLATransformerConfig."""
        values = self.values
        rotary = self.rotary
        config = super().megatron_config() | {
            "multi_latent_attention": True,
            "num_query_groups": self.heads,
            "kv_channels": int(values["v_head_dim"]),
            "qk_layernorm": True,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": int(values["kv_lora_rank"]),
            "qk_head_dim": int(values["qk_nope_head_dim"]),
            "qk_pos_emb_head_dim": int(values["qk_rope_head_dim"]),
            "v_head_dim": int(values["v_head_dim"]),
            "rotary_base": rotary.theta,
            "rope_type": "rope",
        }
        if rotary.kind != "default":
            # With rope_type yarn, Megatron reads the attention factor from the rotary module, here
            # `mcore.rotary`. The other two settings determine the factor on the logits
            # (multi_latent_attention.py:125).
            config |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": float(rotary.settings["factor"]),
                "mscale_all_dim": float(rotary.settings.get("mscale_all_dim") or 0.0),
            }
        return config


FAMILIES.register("deepseek_v3", DeepseekV3)
