"""Qwen3.5 (text, dense): gated delta nets in three of four layers, gated attention in the others.

Positions of text are the same on all three axes of its rotary embedding (`mrope_section`), which is
then the plain one. `qwen3_5` is the model with its vision tower.
"""

from __future__ import annotations

from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.hybrid_decoder import FIXED, LAYERS, UNUSED, HybridDecoder


class Qwen35Text(HybridDecoder):
    """Parameter map of a `qwen3_5_text` config."""

    architecture = "Qwen3_5ForCausalLM"
    fields = Fields(
        used={**LAYERS, "num_key_value_heads": 4, "intermediate_size": REQUIRED},
        fixed=FIXED,
        unused=UNUSED,
    )


FAMILIES.register("qwen3_5_text", Qwen35Text)
