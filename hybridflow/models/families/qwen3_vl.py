"""Qwen3-VL (dense): Qwen3 with positions on three axes, and a vision tower whose features replace
the embeddings of image tokens and are added to the hidden states after the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families.qwen3 import Qwen3
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.rotary import Rotary
from hybridflow.models.vision import Tower

# transformers' defaults
_SECTIONS = (24, 20, 20)
_IMAGE_TOKEN = 151655


class Qwen3Vl(Qwen3):
    """Parameter map of a `qwen3_vl` config, whose language model's fields are `flattened`."""

    architecture = "Qwen3VLForConditionalGeneration"
    stem = "model.language_model."
    positions = 128000
    theta = 500000.0
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": 128, "num_key_value_heads": 32},
        fixed={"attention_bias": (False,)},
        unused=frozenset({"video_token_id", "vision_start_token_id", "vision_end_token_id"}),
        nullable=frozenset({"num_key_value_heads"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.tower = Tower.of(hf, "model.visual.", _IMAGE_TOKEN)

    def layer_windows(self) -> tuple[int, ...]:
        """Return no windows."""
        return ()

    def rotaries(self) -> tuple[Rotary, Rotary | None]:
        """Return the rotary embedding with the sections of its axes."""
        rotary, _ = super().rotaries()
        if rotary.settings.get("mrope_interleaved") is False:
            raise ModelError(
                f"the config of model_type {self.hf['model_type']} has mrope_interleaved=False, "
                "which transformers ignores in this family; set it to true"
            )
        sections = rotary.settings.get("mrope_section", _SECTIONS)
        if (
            not isinstance(sections, list | tuple)
            or len(sections) != 3
            or any(type(one) is not int or one < 0 for one in sections)
        ):
            raise ModelError(
                f"the config of model_type {self.hf['model_type']} has "
                f"mrope_section={sections!r}: expected three whole numbers"
            )
        return replace(rotary, sections=tuple(sections)), None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor of the checkpoint, the tower's last."""
        return super().tensors() | self.tower.tensors()

    def first_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the embedding and the tower, which are on the first stage."""
        return super().first_tensors(at) + self.tower.local_tensors(at)

    def check(self, at: Coordinates) -> None:
        """Check the language model's sizes, and that the first stage has the layers to which the
        tower's features are added."""
        super().check(at)
        self.tower.check(at, self.num_layers)


FAMILIES.register("qwen3_vl", Qwen3Vl)
