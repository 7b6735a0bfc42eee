"""Qwen3: grouped-query attention with a norm on each query and key head, SwiGLU."""

from __future__ import annotations

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Qwen3(Decoder):
    """Parameter map of a `qwen3` config."""

    architecture = "Qwen3ForCausalLM"
    positions = 32768
    qk_norm = True
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": 128, "num_key_value_heads": 32},
        fixed={
            "use_sliding_window": (False,),
            "layer_types": ("full_attention",),
            "attention_bias": (False,),
        },
        unused=frozenset({"sliding_window", "max_window_layers"}),
        nullable=frozenset({"num_key_value_heads"}),
    )


FAMILIES.register("qwen3", Qwen3)
