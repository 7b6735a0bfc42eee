"""Qwen3: grouped-query attention with a norm on each head's queries and keys, SwiGLU."""

from __future__ import annotations

from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Qwen3(Decoder):
    """The map for a `qwen3` config."""

    architecture = "Qwen3ForCausalLM"
    positions = 32768
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": 128, "num_key_value_heads": 32},
        fixed={"use_sliding_window": (False,), "layer_types": ("full_attention",), "attention_bias": (False,)},
        unused=frozenset({"sliding_window", "max_window_layers"}),
        nullable=frozenset({"num_key_value_heads"}),
    )

    def attention(self, layer: int) -> Block:
        """Grouped queries with a norm on each head."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True)

    def mlp(self, layer: int) -> Block:
        """A gated MLP."""
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]))

    def megatron_config(self) -> dict[str, Any]:
        """The decoder's arguments, and norms on queries and keys."""
        return super().megatron_config() | {"qk_layernorm": True}


FAMILIES.register("qwen3", Qwen3)
