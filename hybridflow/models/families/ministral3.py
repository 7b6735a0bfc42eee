"""Ministral 3: Llama's decoder with YaRN, and queries scaled up with their position
(`llama_4_scaling_beta`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.rotary import Rotary
from hybridflow.models.windows import layer_windows

# transformers' rope_parameters where config.json has none
_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(Decoder):
    """Parameter map of a `ministral3` config."""

    architecture = "Ministral3ForCausalLM"
    positions = 262144
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        nullable=frozenset({"head_dim", "num_key_value_heads"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(self.values["sliding_window"], self.num_layers)
        given = hf.get("rope_scaling") or hf.get("rope_parameters")
        if not given:
            self.rotary = Rotary.of(
                {**hf, "rope_parameters": _ROTARY},
                self.head_dim,
                theta=self.theta,
                positions=self.positions,
            )
        growth = self.rotary.settings.get("llama_4_scaling_beta")
        original = self.rotary.settings.get("original_max_position_embeddings")
        if growth is None or (original is None and self.rotary.kind != "yarn"):
            raise ModelError(
                "the config of model_type ministral3 has no llama_4_scaling_beta or no "
                "original_max_position_embeddings in rope_parameters; both are needed to scale the "
                "queries"
            )
        self.rotary = replace(self.rotary, query_growth=float(growth))


FAMILIES.register("ministral3", Ministral3)
