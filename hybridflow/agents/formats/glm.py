"""Calls as GLM-4.5 writes them: <tool_call>name, then <arg_key>...</arg_key><arg_value>...</arg_value> pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.agents.formats.base import Call, blocks, call_format

_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@call_format("glm")
def glm(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every <tool_call> block. A value that is JSON counts as that, any other as text."""
    del tools
    return blocks(text, "<tool_call>", "</tool_call>", _call, "<tool_call>")


def _call(text: str) -> Call:
    name, key, _ = text.partition("<arg_key>")
    pairs = {found[1].strip(): _value(found[2]) for found in _PAIR.finditer(text)}
    if key and not pairs:
        return Call(name.strip(), problem=f"the arguments of {name.strip()} are no pairs of arg_key and arg_value")
    return Call(name.strip(), pairs)


def _value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
