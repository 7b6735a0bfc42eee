"""Mistral: Llama's decoder, with the same sliding window in all layers (7B v0.1) or without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.windows import layer_windows


class Mistral(Decoder):
    """Parameter map of a `mistral` config."""

    architecture = "MistralForCausalLM"
    positions = 131072
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": None,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(self.values["sliding_window"], self.num_layers)


FAMILIES.register("mistral", Mistral)
