"""Qwen3.5 (dense) with its vision tower, for runs with images."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.models.families.qwen3_5_text import Qwen35Text
from hybridflow.models.family import FAMILIES
from hybridflow.models.vision_decoder import UNUSED, VisionDecoder


class Qwen35(VisionDecoder, Qwen35Text):
    """Parameter map of a `qwen3_5` config (`with_tower`)."""

    architecture = "Qwen3_5ForConditionalGeneration"
    sections = (11, 11, 10)
    image_token = 248056
    deepstack = None
    fields = replace(Qwen35Text.fields, unused=Qwen35Text.fields.unused | UNUSED)


FAMILIES.register("qwen3_5", Qwen35)
