"""Calls as MiniMax-M2 writes them: <invoke name="..."> with <parameter name="..."> for each argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format
from hybridflow.agents.tagged_calls import Tags, tagged_calls

_TAGS = Tags(
    begin=re.compile(r"""<invoke name=["']?(?P<name>[^"'>]*)["']?>"""),
    key=re.compile(r"""\s*<parameter name=["']?(?P<key>[^"'>]*)["']?>"""),
    value_end=re.compile(r"</parameter>(?=\s*(?:<parameter name=|</invoke>))"),
    end=re.compile(r"\s*</invoke>"),
    example='<parameter name="key"> blocks',
)
_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"


@call_format("minimax")
def minimax(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <invoke> after the first <minimax:tool_call>."""
    del tools
    _, begun, rest = text.partition(_BEGIN)
    calls = list(tagged_calls(rest, _TAGS))
    if begun and not calls and rest.rpartition(_END)[0].strip():
        return [Call("", problem=f"{_BEGIN} holds no <invoke>")]
    return calls
