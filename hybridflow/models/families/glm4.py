"""GLM-4 (9B and 32B of April 2025, GLM-Z1): Llama's decoder with norms before and after attention
and MLP, and half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention, MlpNames, Norms
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Glm4(Decoder):
    """Parameter map of a `glm4` config."""

    architecture = "Glm4ForCausalLM"
    positions = 131072
    partial = 0.5
    adjacent_pairs = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
        },
        unused=frozenset({"partial_rotary_factor"}),  # read by `Rotary`
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.qkv_bias = bool(self.values["attention_bias"])

    def attention(self, layer: int) -> Block:
        """Return attention with a norm before and after it."""
        norms = Norms("input_layernorm", "post_self_attn_layernorm")
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, self.qkv_bias, norms=norms
        )

    def mlp(self, layer: int) -> Block:
        """Return a gated MLP with a norm before and after it, and with gate and up stored as one
        tensor."""
        names = MlpNames(gate="gate_up_proj", up="gate_up_proj")
        norms = Norms("post_attention_layernorm", "post_mlp_layernorm")
        return DenseMlp(
            self.hidden, int(self.values["intermediate_size"]), names=names, norms=norms
        )

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of GPTModel, including the rotated fraction of each head."""
        return super().gpt_model_kwargs() | {"rotary_percent": self.rotary.share}


FAMILIES.register("glm4", Glm4)
