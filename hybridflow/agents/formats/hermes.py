"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format, json_call

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@call_format("hermes")
def hermes(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block; one that does not end is a problem."""
    del tools
    return [
        json_call(found[1].strip(), "arguments") if found[2] else Call("", problem="<tool_call> is not closed")
        for found in _CALL.finditer(text)
    ]
