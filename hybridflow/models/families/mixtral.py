"""Mixtral: Llama's decoder with experts in every layer and a softmax over the selected logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, Experts, MlpNames
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.softmax_router import softmax_router_config
from hybridflow.models.windows import layer_windows


class Mixtral(Decoder):
    """Parameter map of a `mixtral` config. Its checkpoints name gate, down and up w1, w2 and w3."""

    architecture = "MixtralForCausalLM"
    positions = 131072
    theta = 1e6
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "num_local_experts": REQUIRED,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        fixed={"router_jitter_noise": (0.0,)},
        unused=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        nullable=frozenset({"num_key_value_heads"}),
        aliases={"num_experts": "num_local_experts"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(self.values["sliding_window"], self.num_layers)
        names = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
        self.num_experts, topk, self.ffn = (int(self.values[name]) for name in names)
        self.router = softmax_router_config(self.num_experts, topk, self.ffn, renormalised=True)

    def mlp(self, layer: int) -> Block:
        """Return an experts block for every layer."""
        names = MlpNames(gate="w1", up="w3", down="w2")
        keys = ("intermediate_size", "num_local_experts")
        return Experts(
            self.hidden,
            self.ffn,
            self.num_experts,
            prefix="block_sparse_moe.",
            names=names,
            keys=keys,
        )


FAMILIES.register("mixtral", Mixtral)
