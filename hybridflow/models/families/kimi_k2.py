"""Kimi-K2: DeepSeek-V3's decoder under a model_type of its own."""

from __future__ import annotations

from hybridflow.models.families.deepseek_v3 import DeepseekV3
from hybridflow.models.family import FAMILIES

FAMILIES.register("kimi_k2", DeepseekV3)
