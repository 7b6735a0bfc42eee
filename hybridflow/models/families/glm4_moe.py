"""GLM-4.5 (mixture of experts).

It has grouped-query attention with biases, partial rotary embedding, and DeepSeek's router and
shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import Fields
from hybridflow.models.sigmoid_router import (
    EXPERT_ALIASES,
    LAYER_SIZES,
    ROUTER_FIXED,
    ROUTER_UNUSED,
    SigmoidDecoder,
)


class Glm4Moe(SigmoidDecoder):
    """Parameter map of a `glm4_moe` config. GLM-4.5 has query and key norms; GLM-4.5-Air does not
    (`use_qk_norm`)."""

    architecture = "Glm4MoeForCausalLM"
    positions = 131072
    partial = 0.5
    fields = Fields(
        used={
            **LAYER_SIZES,
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
        aliases=EXPERT_ALIASES,
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.qkv_bias = bool(self.values["attention_bias"])
        self.qk_norm = bool(self.values["use_qk_norm"])

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of GPTModel, including the rotated fraction of each head."""
        return super().gpt_model_kwargs() | {"rotary_percent": self.rotary.share}


FAMILIES.register("glm4_moe", Glm4Moe)
