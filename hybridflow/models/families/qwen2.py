"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values, and optional sliding
windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.windows import layer_windows

WINDOWS: Mapping[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen_windows(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sliding window of each Qwen2 or Qwen3 layer. Layers below `max_window_layers` have
    none."""
    return layer_windows(
        values["sliding_window"] if values["use_sliding_window"] else None,
        int(values["num_hidden_layers"]),
        values["layer_types"],
        lambda layer: layer >= values["max_window_layers"],
    )


class Qwen2(Decoder):
    """Parameter map of a `qwen2` config."""

    architecture = "Qwen2ForCausalLM"
    positions = 32768
    qkv_bias = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": None,
            "num_key_value_heads": 32,
            **WINDOWS,
        },
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = qwen_windows(self.values)


FAMILIES.register("qwen2", Qwen2)
