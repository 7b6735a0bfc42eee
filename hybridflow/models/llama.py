"""Llama 3: grouped-query attention, SwiGLU, rotary embedding scaled as Llama 3.1 does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder


class Llama(Decoder):
    """The map for a `llama` config."""

    architecture = "LlamaForCausalLM"
    required = (*Decoder.required, "intermediate_size")

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if hf.get("mlp_bias") or hf.get("attention_bias"):
            raise ModelError(
                "llama with attention_bias or mlp_bias has no parameter map; published Llama 3 models have neither"
            )
        scaling = self.rope("rope_type", self.rope("type", "default"))
        if scaling not in ("default", "llama3"):
            raise ModelError(
                f"llama with rope_type {scaling!r} is not supported: Megatron scales rotary embeddings as 'llama3' "
                f"does, or not"
            )

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim)

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        return DenseMlp(self.hidden, int(self.hf["intermediate_size"]))

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """See `Decoder`."""
        kwargs = super().gpt_model_kwargs()
        if self.rope("rope_type", self.rope("type")) == "llama3":
            kwargs |= {"rope_scaling": True, "rope_scaling_factor": float(self.rope("factor", 8.0))}
        return kwargs
