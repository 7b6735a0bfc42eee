"""MiniMax-M2's call format: <invoke name="..."> with <parameter name="..."> for each argument."""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls

FORMATS.register(
    "minimax",
    TaggedCalls(
        begin=re.compile(r"""<invoke name=["']?(?P<name>[^"'<>]*+)["']?>"""),
        key=re.compile(r"""\s*+<parameter name=["']?(?P<key>[^"'<>]*+)["']?>"""),
        value_end=re.compile(r"</parameter>(?=\s*+(?:<parameter name=|</invoke>))"),
        end="</invoke>",
        example='<parameter name="key"> blocks',
        section="<minimax:tool_call>",
    ),
)
