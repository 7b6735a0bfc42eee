"""Calls in plain tags: <name>text</name>, where the text is the only argument of the tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format


@call_format("tags")
def tags(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every pair of tags that is named like a tool."""
    names = "|".join(map(re.escape, tools))
    if not names:
        return []
    found = re.finditer(rf"<(?P<name>{names})>(?P<text>.*?)(?P<end></(?P=name)>|\Z)", text, re.DOTALL)
    return [_call(one, tools[one["name"]]) for one in found]


def _call(found: re.Match[str], parameters: Sequence[str]) -> Call:
    if not found["end"]:
        return Call(found["name"], problem=f"<{found['name']}> is not closed")
    if len(parameters) != 1:
        return Call(found["name"], problem=f"{found['name']} takes {len(parameters)} arguments, and tags hold one")
    return Call(found["name"], {parameters[0]: found["text"]})
