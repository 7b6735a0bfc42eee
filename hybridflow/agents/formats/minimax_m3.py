"""MiniMax-M3's call format: <invoke name="..."> with a tag for each argument, where every tag is
prefixed with a mark. Lists and objects are also written as tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.agents.formats.base import MOST_CALLS, Call, call_format

_MARK = "]<]minimax[>["
_SECTION = f"{_MARK}<tool_call>"
_TAG = re.compile(re.escape(_MARK) + r"\s*+<(?P<close>/?)(?P<name>[^<>]*+)>")
_INVOKE = re.compile(r'invoke name="(?P<name>[^"]*+)"')


@dataclass
class _Open:
    """A tag that has not been closed yet: the position of its content, and the values of the tags
    in it."""

    name: str
    start: int
    parts: list[tuple[str, Any]] = field(default_factory=list)

    def value(self, text: str, end: int) -> Any:
        """Return the tag's value: its text if it contains no other tags, otherwise a list or an
        object.
        """
        if not self.parts:
            return text[self.start : end]
        if all(name == "item" for name, _ in self.parts):
            return [value for _, value in self.parts]
        return dict(self.parts)


@call_format("minimax_m3")
def minimax_m3(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the first `MOST_CALLS` calls of the section. A closing tag that does not match the open
    tag is plain text."""
    del tools
    place = text.find(_SECTION)
    if place < 0:
        return []
    place += len(_SECTION)
    calls = list[Call]()
    opened = list[_Open]()
    begin = 0
    called = ""
    for tag in _TAG.finditer(text, place):
        name = tag["name"].strip()
        if not opened:
            invoked = _INVOKE.fullmatch(tag["name"])
            if invoked and not tag["close"]:
                begin = tag.start()
                called = invoked["name"].strip()
                opened.append(_Open("invoke", tag.end()))
        elif not tag["close"]:
            opened.append(_Open(name, tag.end()))
        elif name == opened[-1].name:
            closed = opened.pop()
            if opened:
                value = closed.value(text, tag.start())
                opened[-1].parts.append((name, value))
                continue
            span = (begin, tag.end())
            calls.append(Call(called, dict(closed.parts), is_text=True, span=span))
            if len(calls) == MOST_CALLS:
                return calls
    if opened:
        problem = f"the call to {called} is not closed"
        calls.append(Call(called, problem=problem, span=(begin, len(text))))
    if not calls and text[place:].strip():
        return [Call("", problem=f"{_SECTION} contains no call")]
    return calls
