"""Call formats with JSON arguments between markers, such as `hermes`, `kimi` and `deepseek`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.agents.formats.base import (
    MOST_CALLS,
    MOST_UNREAD,
    Call,
    json_at,
    json_call,
    with_arguments,
)

_MORE = "the call is not valid JSON (text follows the value)"


@dataclass(frozen=True)
class JsonCalls:
    """A call format defined by its markers. A JSON value is parsed as a whole, so strings in it may
    contain markers.

    Attributes:
        begin: opens a call.
        header: regular expression for the text between `begin` and the value. It has either a group
            `name` (with `kind` as its fallback) or a group `id`, from which `name_in_id` extracts
            the name. Without groups, the value is an object that contains the name and the
            arguments.
        end: closes a call.
        lacks: error message for a call without a header.
        fence: text that, like whitespace, may occur between the value and `end`.
        name_in_id: regular expression that matches a whole id and captures the function's name in
            its group `name`.
        value: parses the value at a position, and returns it and its end position. Raises
            ValueError if there is no valid value.
    """

    begin: str
    header: re.Pattern[str]
    end: str
    lacks: str = ""
    fence: str = ""
    name_in_id: re.Pattern[str] | None = None
    value: Callable[[str, int], tuple[Any, int]] = json_at

    def __call__(self, text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
        """Parse the first `MOST_CALLS` calls in the text. Stops after `MOST_UNREAD` calls that are
        unparsable or not closed."""
        del tools
        calls = list[Call]()
        unread = 0
        place = text.find(self.begin)
        while place >= 0 and unread < MOST_UNREAD and len(calls) < MOST_CALLS:
            start = place + len(self.begin)
            header = self.header.match(text, start)
            call = Call("", problem=self.lacks)
            stop = start
            if header:
                call, stop = self._call(header, text)
            problem = call.problem
            closed = text.find(self.end, stop)
            if closed < 0:
                problem = "the call is not closed"
                end = len(text)
            else:
                end = closed + len(self.end)
                if not problem and text[stop:closed].strip() not in ("", self.fence):
                    problem = _MORE
            calls.append(dataclasses.replace(call, problem=problem, span=(place, end)))
            unread += bool(problem)
            place = text.find(self.begin, end)
        return calls

    def _call(self, header: re.Match[str], text: str) -> tuple[Call, int]:
        """Parse the call after a header. Returns the call and the position after its value or, if
        the value cannot be parsed, the position at which it starts.
        """
        groups = header.groupdict()
        number = (groups.get("id") or "").strip()
        named = self.name_in_id.fullmatch(number) if self.name_in_id else None
        if named:
            name = named["name"]
        else:
            name = (groups.get("name") or groups.get("kind") or number).strip()
        try:
            value, stop = self.value(text, header.end())
        except ValueError as error:
            what = f"the arguments of {name} are" if groups else "the call is"
            return Call(name, problem=f"{what} not valid JSON ({error})", id=number), header.end()
        if not groups:
            return json_call(value, "arguments"), stop
        return with_arguments(name, value, number), stop
