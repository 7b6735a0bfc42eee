"""The call format of Qwen3-Coder and Qwen3.5: <function=name> with <parameter=key> for each
argument. Line breaks around a value are not part of it.
"""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls, without_breaks

FUNCTIONS = TaggedCalls(
    begin=re.compile(r"<function=(?P<name>[^<>]*+)>"),
    key=re.compile(r"\s*+<parameter=(?P<key>[^<>]*+)>"),
    value_end=re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))"),
    end="</function>",
    example="<parameter=key> blocks",
    section="<tool_call>",
    value=without_breaks,
)
FORMATS.register("qwen3_coder", FUNCTIONS)
