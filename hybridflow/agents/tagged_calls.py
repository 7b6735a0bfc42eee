"""Calls whose arguments are text between tags, as `glm`, `qwen3_coder` and `minimax` have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.agents.formats.base import Call


@dataclass(frozen=True)
class Tags:
    """The tags of a format.

    Attributes:
        begin: opens a call and holds the group `name`.
        key: opens an argument and holds the group `key`.
        value_end: closes an argument. It counts where another argument or the end of the call follows, so that a value
            may hold it.
        end: closes a call.
        example: how arguments are written, for problems.
    """

    begin: re.Pattern[str]
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    end: re.Pattern[str]
    example: str


def tagged_calls(text: str, tags: Tags) -> Iterator[Call]:
    """The calls of the text, with arguments as they are written."""
    place = 0
    while begin := tags.begin.search(text, place):
        name, place = begin["name"].strip(), begin.end()
        arguments: dict[str, str] = {}
        while key := tags.key.match(text, place):
            closed = tags.value_end.search(text, key.end())
            if closed is None:
                yield Call(name, problem=f"the call of {name} is not closed")
                return
            arguments[key["key"].strip()] = text[key.end() : closed.start()]
            place = closed.end()
        end = tags.end.match(text, place)
        if end is None:
            end = tags.end.search(text, place)
            problem = f"the arguments of {name} are not written as {tags.example}"
            yield Call(name, problem=problem if end else f"the call of {name} is not closed")
            if end is None:
                return
        else:
            yield Call(name, arguments, is_text=True)
        place = end.end()
