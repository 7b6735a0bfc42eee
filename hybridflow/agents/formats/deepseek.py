"""Calls as DeepSeek-V3 and R1 write them: a name and JSON between the tokens of a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, blocks, call_format, with_arguments

_BEGIN, _SEPARATOR, _END = (f"<｜tool▁{word}｜>" for word in ("call▁begin", "sep", "call▁end"))
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<arguments>.*?)\n?```", re.DOTALL)


@call_format("deepseek")
def deepseek(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """`function SEP name, ```json block` (V3, R1) and `name SEP json` (V3.1)."""
    del tools
    return blocks(text, _BEGIN, _END, _call, "the call")


def _call(text: str) -> Call:
    before, separator, after = text.partition(_SEPARATOR)
    if not separator:
        return Call("", problem=f"the call has no {_SEPARATOR}")
    if before.strip() == "function" and (fenced := _FENCED.match(after.strip())):
        return with_arguments(fenced["name"].strip(), fenced["arguments"])
    return with_arguments(before.strip(), after.strip())
