"""Qwen3: grouped-query attention with a norm on each query and key head, and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.decoder import Decoder
from hybridflow.models.families.qwen2 import WINDOWS, qwen_windows
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Qwen3(Decoder):
    """Parameter map of a `qwen3` config."""

    architecture = "Qwen3ForCausalLM"
    positions = 32768
    qk_norm = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 128,
            "num_key_value_heads": 32,
            **WINDOWS,
        },
        fixed={"attention_bias": (False,)},
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = self.layer_windows()

    def layer_windows(self) -> tuple[int, ...]:
        """Return the number of tokens that each layer attends to; 0 means all."""
        return qwen_windows(self.values)


FAMILIES.register("qwen3", Qwen3)
