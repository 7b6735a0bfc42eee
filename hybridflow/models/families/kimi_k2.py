"""Kimi-K2: DeepSeek-V3's decoder under a separate model_type."""

from __future__ import annotations

from hybridflow.models.families.deepseek_v3 import DeepseekV3
from hybridflow.models.family import FAMILIES

FAMILIES.register("kimi_k2", DeepseekV3)
