"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Qwen2(Decoder):
    """Parameter map of a `qwen2` config."""

    architecture = "Qwen2ForCausalLM"
    positions = 32768
    qkv_bias = True
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None, "num_key_value_heads": 32},
        fixed={"use_sliding_window": (False,), "layer_types": ("full_attention",)},
        unused=frozenset({"sliding_window", "max_window_layers"}),
        nullable=frozenset({"num_key_value_heads"}),
    )


FAMILIES.register("qwen2", Qwen2)
