"""Qwen3-MoE: Qwen3's attention, experts in every layer, and a softmax router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, Experts
from hybridflow.models.families.qwen3 import Qwen3
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.softmax_router import softmax_router_config
from hybridflow.models.windows import layer_windows


class Qwen3Moe(Qwen3):
    """Parameter map of a `qwen3_moe` config."""

    architecture = "Qwen3MoeForCausalLM"
    fields = Fields(
        used={
            "moe_intermediate_size": REQUIRED,
            "num_experts": REQUIRED,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "head_dim": None,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        fixed={
            "attention_bias": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (),
        },
        unused=frozenset({"intermediate_size", "output_router_logits", "router_aux_loss_coef"}),
        nullable=frozenset({"sliding_window"}),
        aliases={"num_local_experts": "num_experts"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        experts, topk, self.ffn = (int(self.values[name]) for name in names)
        self.router = softmax_router_config(
            experts, topk, self.ffn, renormalised=bool(self.values.get("norm_topk_prob", True))
        )

    def layer_windows(self) -> tuple[int, ...]:
        """Return the same window for all layers, or no windows."""
        window = self.values["sliding_window"] if self.values["use_sliding_window"] else None
        return layer_windows(window, self.num_layers)

    def mlp(self, layer: int) -> Block:
        """Return an experts block for every layer."""
        return Experts(self.hidden, self.ffn, int(self.values["num_experts"]))


FAMILIES.register("qwen3_moe", Qwen3Moe)
