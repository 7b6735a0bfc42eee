"""Calls as GLM-4.5 and later write them: <tool_call>name, then <arg_key>...</arg_key><arg_value>...</arg_value>
pairs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format
from hybridflow.agents.tagged_calls import Tags, tagged_calls

_TAGS = Tags(
    begin=re.compile(r"<tool_call>(?P<name>[^<]*)"),
    key=re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
    end=re.compile(r"\s*</tool_call>"),
    example="pairs of arg_key and arg_value",
)


@call_format("glm")
def glm(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block."""
    del tools
    return list(tagged_calls(text, _TAGS))
