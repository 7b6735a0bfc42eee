"""Seed-OSS's call format: the same as Qwen3-Coder's, enclosed in <seed:tool_call>."""

from __future__ import annotations

import dataclasses

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.formats.qwen3_coder import FUNCTIONS

FORMATS.register("seed_oss", dataclasses.replace(FUNCTIONS, section="<seed:tool_call>"))
