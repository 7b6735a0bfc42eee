"""Calls as Kimi-K2 writes them: an id that holds the name, functions.NAME:INDEX, and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, JsonBlock, call_format, json_blocks, with_arguments

_BEGIN, _ARGUMENTS, _END = (f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end"))
_HEADER = re.compile(rf"(?P<id>[^<]*){re.escape(_ARGUMENTS)}\s*")
_CLOSED = re.compile(rf"\s*{re.escape(_END)}")
_NAME = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?")


@call_format("kimi")
def kimi(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every call of the tool call section. The id goes to the chat template with the result."""
    del tools
    return [_call(one) for one in json_blocks(text, _BEGIN, _HEADER, _CLOSED, "the call")]


def _call(block: JsonBlock) -> Call:
    if block.header is None:
        return Call("", problem=block.problem if "closed" in block.problem else f"the call has no {_ARGUMENTS}")
    number = block.header["id"].strip()
    found = _NAME.fullmatch(number)
    name = found["name"] if found else number
    if block.problem:
        return Call(name, problem=f"the arguments of {name}: {block.problem}", id=number)
    return with_arguments(name, block.value, number)
