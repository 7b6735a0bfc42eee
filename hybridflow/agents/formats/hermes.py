"""The call format of Hermes and Qwen models: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>."""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.json_calls import JsonCalls

FORMATS.register(
    "hermes", JsonCalls(begin="<tool_call>", header=re.compile(r"\s*"), end="</tool_call>")
)
