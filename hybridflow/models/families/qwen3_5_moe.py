"""Qwen3.5 (mixture of experts) with its vision tower, for runs with images."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.models.families.qwen3_5_moe_text import Qwen35MoeText
from hybridflow.models.family import FAMILIES
from hybridflow.models.vision_decoder import UNUSED, VisionDecoder


class Qwen35Moe(VisionDecoder, Qwen35MoeText):
    """Parameter map of a `qwen3_5_moe` config (`with_tower`)."""

    architecture = "Qwen3_5MoeForConditionalGeneration"
    sections = (11, 11, 10)
    image_token = 248056
    deepstack = None
    fields = replace(Qwen35MoeText.fields, unused=Qwen35MoeText.fields.unused | UNUSED)


FAMILIES.register("qwen3_5_moe", Qwen35Moe)
