"""ERNIE 4.5 with experts: rotary embedding of adjacent elements, and experts chosen by softmax
probabilities plus a bias, in addition to shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, Experts
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.softmax_router import softmax_router_config


class Ernie45Moe(Decoder):
    """Parameter map of an `ernie4_5_moe` config."""

    architecture = "Ernie4_5_MoeForCausalLM"
    positions = 131072
    theta = 500000.0
    adjacent_pairs = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "head_dim": None,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        # moe_gate and moe_use_aux_free occur only in the published configs
        fixed={
            "use_bias": (False,),
            "moe_norm_min": (1e-12,),
            "moe_gate": ("topk",),
            "moe_use_aux_free": (True,),
        },
        unused=frozenset(
            {
                *("output_router_logits", "router_aux_loss_coef", "moe_capacity"),
                "num_nextn_predict_layers",
            }
        ),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        values = self.values
        self.num_experts = int(values["moe_num_experts"])
        self.ffn = int(values["moe_intermediate_size"])
        self.shared_ffn = int(values["moe_num_shared_experts"]) * self.ffn
        values["num_experts_per_tok"] = topk = int(values["moe_k"])
        self.router = softmax_router_config(
            self.num_experts, topk, self.ffn, renormalised=True, key="moe_k"
        )
        self.router |= {
            "moe_layer_freq": [int(self.is_sparse(layer)) for layer in range(self.num_layers)],
            "moe_router_enable_expert_bias": True,
            # as for the sigmoid router: updated only with actor.expert_bias_update_rate
            "moe_router_bias_update_rate": 0.0,
        }
        if self.shared_ffn:
            self.router["moe_shared_expert_intermediate_size"] = self.shared_ffn

    def is_sparse(self, layer: int) -> bool:
        """Return True if a layer has experts."""
        first, last, interval = (
            int(self.values[f"moe_layer_{name}"])
            for name in ("start_index", "end_index", "interval")
        )
        last = self.num_layers - 1 if last == -1 else last
        return first <= layer <= last and (layer + 1) % interval == 0

    def mlp(self, layer: int) -> Block:
        """Return an experts block for a sparse layer, else a gated MLP."""
        if not self.is_sparse(layer):
            return super().mlp(layer)
        return Experts(
            self.hidden,
            self.ffn,
            self.num_experts,
            shared_ffn=self.shared_ffn,
            expert_bias=True,
            bias="moe_statics.e_score_correction_bias",
            bias_shape=(1, self.num_experts),
            keys=("moe_intermediate_size", "moe_num_experts"),
        )


FAMILIES.register("ernie4_5_moe", Ernie45Moe)
