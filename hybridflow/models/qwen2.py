"""Qwen2 and Qwen2.5: Llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder


class Qwen2(Decoder):
    """The map for a `qwen2` config."""

    architecture = "Qwen2ForCausalLM"
    required = (*Decoder.required, "intermediate_size")

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if hf.get("use_sliding_window"):
            raise ModelError(
                "qwen2 with use_sliding_window is not supported: set it to false (published Qwen2.5 configs do)"
            )

    def attention(self, layer: int) -> Block:
        """See `Decoder`."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim, qkv_bias=True)

    def mlp(self, layer: int) -> Block:
        """See `Decoder`."""
        return DenseMlp(self.hidden, int(self.hf["intermediate_size"]))

    def megatron_config(self) -> dict[str, Any]:
        """See `Decoder`."""
        return super().megatron_config() | {"add_qkv_bias": True}
