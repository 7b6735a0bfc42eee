"""Calls written as plain tags: <name>text</name>, where the text is the tool's only argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import MOST_CALLS, Call, call_format


@call_format("tags")
def tags(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the first `MOST_CALLS` pairs of tags that are named after a tool. A call ends at the
    last closing tag before the next call, so its text may contain a closing tag."""
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
    calls: list[Call] = []
    opened: re.Match[str] | None = None
    closed: re.Match[str] | None = None
    if not names:
        return calls
    for found in re.finditer(rf"<(?P<close>/?)(?P<name>{names})>", text):
        if found["close"]:
            if opened and found["name"] == opened["name"]:
                closed = found
        elif not opened or closed:
            if opened:
                calls.append(_call(opened, closed, tools))
            opened = found
            closed = None
            if len(calls) == MOST_CALLS:
                return calls
    if opened:
        calls.append(_call(opened, closed, tools))
    return calls


def _call(
    opened: re.Match[str], closed: re.Match[str] | None, tools: Mapping[str, Sequence[str]]
) -> Call:
    name = opened["name"]
    text = opened.string
    begin = opened.start()
    if closed is None:
        return Call(name, problem=f"<{name}> is not closed", span=(begin, len(text)))
    span = (begin, closed.end())
    parameters = tools[name]
    if len(parameters) != 1:
        problem = f"{name} takes {len(parameters)} arguments, but tags allow only one"
        return Call(name, problem=problem, span=span)
    inside = text[opened.end() : closed.start()]
    return Call(name, {parameters[0]: inside}, is_text=True, span=span)
