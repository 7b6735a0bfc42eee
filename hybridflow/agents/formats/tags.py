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
    for found in re.finditer(rf"<(?P<close>/?)(?P<name>{names})>", text) if names else ():
        if found["close"]:
            if opened and found["name"] == opened["name"]:
                closed = found
        elif not opened or closed:
            calls += [_call(opened, closed, tools)] if opened else []
            opened = found
            closed = None
            if len(calls) == MOST_CALLS:
                return calls
    return [*calls, _call(opened, closed, tools)] if opened else calls


def _call(
    opened: re.Match[str], closed: re.Match[str] | None, tools: Mapping[str, Sequence[str]]
) -> Call:
    name = opened["name"]
    text = opened.string
    span = opened.start(), closed.end() if closed else len(text)
    if closed is None:
        return Call(name, problem=f"<{name}> is not closed", span=span)
    parameters = tools[name]
    if len(parameters) != 1:
        return Call(
            name,
            problem=f"{name} takes {len(parameters)} arguments, but tags allow only one",
            span=span,
        )
    return Call(name, {parameters[0]: text[opened.end() : closed.start()]}, is_text=True, span=span)
