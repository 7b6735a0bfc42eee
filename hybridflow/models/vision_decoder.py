"""Decoders of vision-language models: positions on three axes, and a vision tower whose features
replace the embeddings of image tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.rotary import Rotary
from hybridflow.models.vision import Tower

# fields of their configs that do not affect log-probs of images and text
UNUSED = frozenset({"video_token_id", "vision_start_token_id", "vision_end_token_id"})


class VisionDecoder(Decoder):
    """Base class of the families with a vision tower, together with the family of their language
    model. The fields of config.json are `flattened`, with the tower's under `vision_config`.

    Attributes:
        sections: transformers' default for `mrope_section`.
        image_token: transformers' default for `image_token_id`.
        deepstack: transformers' default for `deepstack_visual_indexes`; None: no DeepStack.
    """

    stem = "model.language_model."
    sections: tuple[int, ...] = (24, 20, 20)
    image_token = 151655
    deepstack: Sequence[int] | None = (8, 16, 24)

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.tower = Tower.of(hf, "model.visual.", self.image_token, self.deepstack)

    def num_prediction_heads(self) -> int:
        """Return 0, because multi-token-prediction heads do not receive the tower's features."""
        return 0

    def rotaries(self) -> tuple[Rotary, Rotary | None]:
        """Return the rotary embedding with the sections of its axes."""
        rotary, _ = super().rotaries()
        if rotary.settings.get("mrope_interleaved") is False:
            raise ModelError(
                f"the config of model_type {self.hf['model_type']} has mrope_interleaved=False, "
                "which transformers ignores in this family; set it to true"
            )
        sections = rotary.settings.get("mrope_section", self.sections)
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
