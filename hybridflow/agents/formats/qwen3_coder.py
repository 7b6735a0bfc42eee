"""Calls as Qwen3-Coder and Qwen3.5 write them: <function=name> with <parameter=key> for each argument."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format
from hybridflow.agents.tagged_calls import Tags, tagged_calls

_TAGS = Tags(
    begin=re.compile(r"<tool_call>\s*<function=(?P<name>[^>]*)>"),
    key=re.compile(r"\s*<parameter=(?P<key>[^>]*)>"),
    value_end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    end=re.compile(r"\s*</function>\s*</tool_call>"),
    example="<parameter=key> blocks",
)


@call_format("qwen3_coder")
def qwen3_coder(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block. A value stands between line breaks that are not part of it."""
    del tools
    return [_without_breaks(call) for call in tagged_calls(text, _TAGS)]


def _without_breaks(call: Call) -> Call:
    arguments = {key: value.removeprefix("\n").removesuffix("\n") for key, value in call.arguments.items()}
    return dataclasses.replace(call, arguments=arguments)
