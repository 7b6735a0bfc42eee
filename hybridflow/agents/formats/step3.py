"""Step-3's call format: <steptml:invoke name="..."> with <steptml:parameter name="..."> for each
argument."""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls

FORMATS.register(
    "step3",
    TaggedCalls(
        begin=re.compile(r"""<steptml:invoke name="(?P<name>[^"<>]*+)">"""),
        key=re.compile(r"""\s*+<steptml:parameter name="(?P<key>[^"<>]*+)">"""),
        value_end=re.compile(
            r"</steptml:parameter>(?=\s*+(?:<steptml:parameter name=|</steptml:invoke>))"
        ),
        end="</steptml:invoke>",
        example='<steptml:parameter name="key"> blocks',
        section="<｜tool_calls_begin｜>",
    ),
)
