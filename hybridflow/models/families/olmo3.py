"""OLMo 3: OLMo 2's decoder with a sliding window and unscaled rotary embedding in three of every
four layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridflow.models.families.olmo2 import Olmo2
from hybridflow.models.family import FAMILIES
from hybridflow.models.rotary import Rotary, rotaries_by_kind
from hybridflow.models.windows import layer_windows


class Olmo3(Olmo2):
    """Parameter map of an `olmo3` config."""

    architecture = "Olmo3ForCausalLM"
    theta = 500000.0
    fields = replace(
        Olmo2.fields,
        used={**Olmo2.fields.used, "sliding_window": 4096, "layer_types": None},
        nullable=frozenset({"sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(
            self.values["sliding_window"],
            self.num_layers,
            self.values["layer_types"],
            lambda layer: (layer + 1) % 4 != 0,
        )

    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Return the rotary embeddings of full-attention layers and of sliding-window layers."""
        return rotaries_by_kind(
            self.hf,
            self.head_dim,
            theta=self.theta,
            # transformers applies the top-level rope_theta only to full-attention layers
            local_theta=self.theta,
            positions=self.positions,
        )


FAMILIES.register("olmo3", Olmo3)
