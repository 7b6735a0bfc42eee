"""Mistral (7B v0.2 and v0.3, NeMo, Small): Llama's decoder without a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Mistral(Decoder):
    """The map for a `mistral` config."""

    architecture = "MistralForCausalLM"
    positions = 131072
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None, "num_key_value_heads": 8},
        fixed={"sliding_window": ()},
        nullable=frozenset({"num_key_value_heads"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        if "sliding_window" not in hf:
            raise ModelError(
                "the config of model_type mistral lacks sliding_window, which transformers then "
                "takes as 4096, and windows are not supported; set sliding_window to null if the "
                "model was trained without one"
            )


FAMILIES.register("mistral", Mistral)
