"""Qwen2 and Qwen2.5: Llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Qwen2(Decoder):
    """The map for a `qwen2` config."""

    architecture = "Qwen2ForCausalLM"
    positions = 32768
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None, "num_key_value_heads": 32},
        fixed={"use_sliding_window": (False,), "layer_types": ("full_attention",)},
        unused=frozenset({"sliding_window", "max_window_layers"}),
        nullable=frozenset({"num_key_value_heads"}),
    )

    def attention(self, layer: int) -> Block:
        """Grouped queries with biases on queries, keys and values."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim, qkv_bias=True)

    def mlp(self, layer: int) -> Block:
        """A gated MLP."""
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]))

    def megatron_config(self) -> dict[str, Any]:
        """With biases on queries, keys and values."""
        return super().megatron_config() | {"add_qkv_bias": True}


FAMILIES.register("qwen2", Qwen2)
