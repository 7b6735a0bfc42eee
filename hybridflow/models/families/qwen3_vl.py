"""Qwen3-VL (dense): Qwen3 with a vision tower, whose features are also added to the hidden states
after the first layers."""

from __future__ import annotations

from hybridflow.models.families.qwen3 import Qwen3
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.vision_decoder import UNUSED, VisionDecoder


class Qwen3Vl(VisionDecoder, Qwen3):
    """Parameter map of a `qwen3_vl` config."""

    architecture = "Qwen3VLForConditionalGeneration"
    positions = 128000
    theta = 500000.0
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": 128, "num_key_value_heads": 32},
        fixed={"attention_bias": (False,)},
        unused=UNUSED,
        nullable=frozenset({"num_key_value_heads"}),
    )

    def layer_windows(self) -> tuple[int, ...]:
        """Return no windows."""
        return ()


FAMILIES.register("qwen3_vl", Qwen3Vl)
