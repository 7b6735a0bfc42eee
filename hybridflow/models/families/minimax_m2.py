"""MiniMax-M2: norms across all query and all key heads, partial rotary embedding, and experts in
every layer, chosen by sigmoid scores with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, Experts, GroupedAttention, MlpNames
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import Fields
from hybridflow.models.rotary import Rotary
from hybridflow.models.sigmoid_router import sigmoid_router_config

_EXPERTS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")


class MiniMaxM2(Decoder):
    """Parameter map of a `minimax_m2` config."""

    architecture = "MiniMaxM2ForCausalLM"
    positions = 196608
    theta = 5e6
    partial = 1.0
    qk_norm = True
    fields = Fields(
        used={
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rotary_dim": None,
        },
        # all but router_jitter_noise occur only in the published configs
        fixed={
            "router_jitter_noise": (0.0,),
            "attn_type_list": (1,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "sliding_window": (),
            "layernorm_full_attention_beta": (1.0,),
            "layernorm_linear_attention_beta": (1.0,),
            "layernorm_mlp_beta": (1.0,),
        },
        unused=frozenset(
            {
                *("output_router_logits", "router_aux_loss_coef", "partial_rotary_factor"),
                *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
                *("mlp_intermediate_size", "shared_moe_mode"),
            }
        ),
        aliases={"num_experts": "num_local_experts"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if self.values["rotary_dim"] is not None:  # the published name of the rotated fraction
            share = self.values["rotary_dim"] / self.head_dim
            self.rotary = Rotary.of(
                {"partial_rotary_factor": share, **hf},
                self.head_dim,
                theta=self.theta,
                positions=self.positions,
                partial=self.partial,
            )
        self.num_experts, topk, self.ffn = (int(self.values[name]) for name in _EXPERTS)
        self.router = sigmoid_router_config(
            {
                "num_hidden_layers": self.num_layers,
                "n_routed_experts": self.num_experts,
                "num_experts_per_tok": topk,
                "moe_intermediate_size": self.ffn,
                "first_k_dense_replace": 0,
                "n_shared_experts": 0,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
            }
        )

    def attention(self, layer: int) -> Block:
        """Return attention with norms across all heads."""
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True, wide_norm=True
        )

    def mlp(self, layer: int) -> Block:
        """Return an experts block for every layer."""
        return Experts(
            self.hidden,
            self.ffn,
            self.num_experts,
            expert_bias=True,
            bias="e_score_correction_bias",
            prefix="block_sparse_moe.",
            names=MlpNames(gate="w1", up="w3", down="w2"),
            keys=("intermediate_size", "num_local_experts"),
        )

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of GPTModel, including the rotated fraction of each head."""
        return super().gpt_model_kwargs() | {"rotary_percent": self.rotary.share}


FAMILIES.register("minimax_m2", MiniMaxM2)
