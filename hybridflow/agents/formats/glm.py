"""The call format of GLM-4.5 and later: <tool_call>name, followed by pairs
<arg_key>...</arg_key><arg_value>...</arg_value>."""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls

FORMATS.register(
    "glm",
    TaggedCalls(
        begin=re.compile(r"<tool_call>(?P<name>[^<]*+)"),
        key=re.compile(r"\s*+<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>"),
        value_end=re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))"),
        end="</tool_call>",
        example="pairs of arg_key and arg_value",
    ),
)
