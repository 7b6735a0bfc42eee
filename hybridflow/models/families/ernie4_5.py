"""ERNIE 4.5 (dense): Llama's decoder with rotary embedding of adjacent elements."""

from __future__ import annotations

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Ernie45(Decoder):
    """Parameter map of an `ernie4_5` config."""

    architecture = "Ernie4_5ForCausalLM"
    positions = 131072
    theta = 500000.0
    adjacent_pairs = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        fixed={"use_bias": (False,)},
        nullable=frozenset({"head_dim", "num_key_value_heads"}),
    )


FAMILIES.register("ernie4_5", Ernie45)
