"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format, json_blocks, json_call

_BEFORE, _END = re.compile(r"\s*"), re.compile(r"\s*</tool_call>")


@call_format("hermes")
def hermes(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block; one that does not end is a problem."""
    del tools
    blocks = json_blocks(text, "<tool_call>", _BEFORE, _END, "<tool_call>")
    return [
        Call("", problem=f"the call {one.problem}" if one.problem.startswith("is no JSON") else one.problem)
        if one.problem
        else json_call(one.value, "arguments")
        for one in blocks
    ]
