"""Calls in plain tags: <name>text</name>, where the text is the only argument of the tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format


@call_format("tags")
def tags(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Every pair of tags that is named like a tool. A call ends at the last closing tag before another call, so that
    its text may hold one."""
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
    calls: list[Call] = []
    opened, closed = "", None
    begin = 0
    for found in re.finditer(rf"<(?P<close>/?)(?P<name>{names})>", text) if names else ():
        if found["close"]:
            if found["name"] == opened:
                closed = found.start()
        elif not opened or closed is not None:
            calls += [_call(opened, text[begin:closed], tools[opened])] if opened else []
            opened, begin, closed = found["name"], found.end(), None
    if opened:
        is_closed = closed is not None
        problem = Call(opened, problem=f"<{opened}> is not closed")
        calls.append(_call(opened, text[begin:closed], tools[opened]) if is_closed else problem)
    return calls


def _call(name: str, text: str, parameters: Sequence[str]) -> Call:
    if len(parameters) != 1:
        return Call(name, problem=f"{name} takes {len(parameters)} arguments, and tags hold one")
    return Call(name, {parameters[0]: text}, is_text=True)
