"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, a softmax router, and a gated shared
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block
from hybridflow.models.decoder import Decoder
from hybridflow.models.families.qwen2 import WINDOWS
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.softmax_router import gated_mixture
from hybridflow.models.windows import layer_windows


class Qwen2Moe(Decoder):
    """Parameter map of a `qwen2_moe` config."""

    architecture = "Qwen2MoeForCausalLM"
    positions = 32768
    fields = Fields(
        used={
            "moe_intermediate_size": REQUIRED,
            "shared_expert_intermediate_size": 5632,
            "num_experts": REQUIRED,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "head_dim": None,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            **WINDOWS,
        },
        fixed={
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (),
        },
        unused=frozenset(
            {
                *("intermediate_size", "output_router_logits", "router_aux_loss_coef"),
            }
        ),
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        values = self.values
        self.windows = layer_windows(
            values["sliding_window"] if values["use_sliding_window"] else None,
            self.num_layers,
            values["layer_types"],
            lambda layer: layer % 2 == 0 and layer < values["max_window_layers"],
        )
        self.qkv_bias = bool(values["qkv_bias"])
        self.experts, self.router = gated_mixture(
            self.hidden, values, renormalised=bool(values["norm_topk_prob"])
        )

    def mlp(self, layer: int) -> Block:
        """Return routed experts and a gated shared expert for every layer."""
        return self.experts


FAMILIES.register("qwen2_moe", Qwen2Moe)
