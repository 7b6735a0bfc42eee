"""Mixtral: Llama's decoder with experts in every layer, softmax over the chosen logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, Experts, GroupedAttention, MlpNames
from hybridflow.models.decoder import Decoder


class Mixtral(Decoder):
    """The map for a `mixtral` config. Its checkpoints call gate, down and up w1, w2 and w3."""

    architecture = "MixtralForCausalLM"
    required = (*Decoder.required, "intermediate_size", "num_local_experts", "num_experts_per_tok")

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if hf.get("sliding_window"):
            raise ModelError("mixtral with sliding_window is not supported: set it to null (Mixtral 8x7B and 8x22B do)")

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim)

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        names = MlpNames(gate="w1", up="w3", down="w2")
        return Experts(
            self.hidden,
            int(self.hf["intermediate_size"]),
            int(self.hf["num_local_experts"]),
            prefix="block_sparse_moe.",
            names=names,
        )

    def megatron_config(self) -> dict[str, Any]:
        """See `Decoder`."""
        return super().megatron_config() | {
            "num_moe_experts": int(self.hf["num_local_experts"]),
            "moe_router_topk": int(self.hf["num_experts_per_tok"]),
            "moe_ffn_hidden_size": int(self.hf["intermediate_size"]),
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            # softmax over all logits, renormalised over the chosen, equals a softmax over the chosen logits
            "moe_router_pre_softmax": False,
        }
