"""Call formats in which arguments are text between tags, such as `glm`, `qwen3_coder` and
`minimax`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.agents.formats.base import MOST_CALLS, Call, json_at


def as_written(key: re.Match[str], text: str) -> str:
    """Return the value exactly as written between its tags."""
    del key
    return text


def without_breaks(key: re.Match[str], text: str) -> str:
    """Return the value without the line breaks adjacent to its tags."""
    del key
    return text.removeprefix("\n").removesuffix("\n")


def json_or_text(text: str) -> Any:
    """Parse the text as JSON. Returns the text if that fails."""
    plain = text.strip()
    try:
        value, end = json_at(plain, 0)
    except ValueError:
        return text
    return value if end == len(plain) else text


@dataclass(frozen=True)
class TaggedCalls:
    """A call format defined by its tags.

    Attributes:
        begin: regular expression that opens a call, with the group `name`.
        key: regular expression that opens an argument, with the group `key`.
        value_end: closes an argument. It is recognised only if another argument or the end of the
            call follows, so values may contain it.
        end: closes a call.
        example: how arguments are written, for error messages.
        section: text that opens the section of calls, in which at least one call is required; empty
            if calls may occur anywhere in the text.
        value: converts (opening tag, text) to the argument's value.
        is_text: values are text that must be converted to the types that the tool declares.
    """

    begin: re.Pattern[str]
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    end: str
    example: str
    section: str = ""
    value: Callable[[re.Match[str], str], Any] = as_written
    is_text: bool = True

    def __call__(self, text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
        """Parse the first `MOST_CALLS` calls in the text. Calls that are unparsable or not closed
        have their `problem` set."""
        del tools
        place = text.find(self.section)
        calls: list[Call] = []
        while place >= 0 and len(calls) < MOST_CALLS and (begin := self.begin.search(text, place)):
            calls.append(self._call(begin, text))
            place = calls[-1].span[1]
        if self.section and not calls and text.partition(self.section)[2].strip():
            return [Call("", problem=f"{self.section} contains no call")]
        return calls

    def _call(self, begin: re.Match[str], text: str) -> Call:
        name = begin["name"].strip()
        place = begin.end()
        arguments = dict[str, Any]()
        problem = f"the call to {name} is not closed"
        not_closed = Call(name, problem=problem, span=(begin.start(), len(text)))
        while key := self.key.match(text, place):
            closed = self.value_end.search(text, key.end())
            if closed is None:
                return not_closed
            inside = text[key.end() : closed.start()]
            arguments[key["key"].strip()] = self.value(key, inside)
            place = closed.end()
        end = text.find(self.end, place)
        if end < 0:
            return not_closed
        span = begin.start(), end + len(self.end)
        if text[place:end].strip():
            problem = f"the arguments of {name} must be written as {self.example}"
            return Call(name, problem=problem, span=span)
        return Call(name, arguments, is_text=self.is_text, span=span)
