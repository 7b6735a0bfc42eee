"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, blocks, call_format, json_call


@call_format("hermes")
def hermes(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block; one that does not end is a problem."""
    del tools
    return blocks(text, "<tool_call>", "</tool_call>", lambda call: json_call(call.strip(), "arguments"), "<tool_call>")
