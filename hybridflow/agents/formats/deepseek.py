"""Calls as DeepSeek-V3 and R1 write them: a name and JSON between the tokens of a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, JsonBlock, call_format, json_blocks, with_arguments

_BEGIN, _SEPARATOR, _END = (f"<｜tool▁{word}｜>" for word in ("call▁begin", "sep", "call▁end"))
_HEADER = re.compile(rf"(?P<kind>[^<]*){_SEPARATOR}\s*(?:(?P<name>[^\n`{{]*)\n```(?:json)?)?\s*")
_CLOSED = re.compile(rf"\s*(?:```)?\s*{_END}")


@call_format("deepseek")
def deepseek(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """`function SEP name, ```json block` (V3, R1) and `name SEP json` (V3.1)."""
    del tools
    return [_call(one) for one in json_blocks(text, _BEGIN, _HEADER, _CLOSED, "the call")]


def _call(block: JsonBlock) -> Call:
    if block.header is None:
        return Call("", problem=block.problem if "closed" in block.problem else f"the call has no {_SEPARATOR}")
    name = (block.header["name"] or block.header["kind"]).strip()
    if block.problem:
        return Call(name, problem=f"the arguments of {name}: {block.problem}")
    return with_arguments(name, block.value)
