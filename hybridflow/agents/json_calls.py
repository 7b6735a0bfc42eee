"""Calls whose arguments are JSON between markers, as `hermes`, `kimi` and `deepseek` have them."""

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

_MORE = "the call is no JSON (text follows the value)"


@dataclass(frozen=True)
class JsonCalls:
    """A format of calls that is described by its markers. A value is read from its first character
    to its last, whatever is written in its strings.

    Attributes:
        begin: opens a call.
        header: what stands between `begin` and the value, with the group `name` (`kind` is the name
            where that has found nothing), or `id`, of which `name_in_id` finds it; without groups
            the value is an object that holds the name and the arguments.
        end: closes a call.
        lacks: what is told of a call without its header.
        fence: what may stand between the value and `end` beside white space.
        name_in_id: matches a whole id; its group `name` is the name.
        value: reads the value that begins at a place, and where it ends. ValueError: there is none.
    """

    begin: str
    header: re.Pattern[str]
    end: str
    lacks: str = ""
    fence: str = ""
    name_in_id: re.Pattern[str] | None = None
    value: Callable[[str, int], tuple[Any, int]] = json_at

    def __call__(self, text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
        """The first `MOST_CALLS` calls of the text, up to the last of `MOST_UNREAD` that cannot be
        read or do not end."""
        del tools
        calls = list[Call]()
        unread = 0
        place = text.find(self.begin)
        while place >= 0 and unread < MOST_UNREAD and len(calls) < MOST_CALLS:
            start = place + len(self.begin)
            header = self.header.match(text, start)
            call, stop = (
                self._call(header, text) if header else (Call("", problem=self.lacks), start)
            )
            closed = text.find(self.end, stop)
            end = closed + len(self.end) if closed >= 0 else len(text)
            problem = call.problem or (
                "" if text[stop:closed].strip() in ("", self.fence) else _MORE
            )
            problem = problem if closed >= 0 else "the call is not closed"
            calls.append(dataclasses.replace(call, problem=problem, span=(place, end)))
            unread += bool(problem)
            place = text.find(self.begin, end)
        return calls

    def _call(self, header: re.Match[str], text: str) -> tuple[Call, int]:
        """The call behind a header, and where its value ends; an unreadable one ends where it
        begins."""
        groups = header.groupdict()
        number = (groups.get("id") or "").strip()
        named = self.name_in_id.fullmatch(number) if self.name_in_id else None
        name = (
            named["name"] if named else (groups.get("name") or groups.get("kind") or number).strip()
        )
        try:
            value, stop = self.value(text, header.end())
        except ValueError as error:
            what = f"the arguments of {name} are" if groups else "the call is"
            return Call(name, problem=f"{what} no JSON ({error})", id=number), header.end()
        return with_arguments(name, value, number) if groups else json_call(
            value, "arguments"
        ), stop
