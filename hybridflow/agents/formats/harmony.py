"""The call format of gpt-oss: messages addressed to functions.NAME in the commentary channel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import (
    MOST_CALLS,
    MOST_UNREAD,
    Call,
    call_format,
    json_at,
    with_arguments,
)

_MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"to=functions\.(?P<name>[^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_SPACE = re.compile(r"\s*")


@call_format("harmony")
def harmony(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse every message addressed to a function, except in the analysis channel. Stops after
    `MOST_UNREAD` unparsable calls."""
    del tools
    calls = list[Call]()
    unread = 0
    place = 0
    while (
        unread < MOST_UNREAD
        and len(calls) < MOST_CALLS
        and (message := text.find(_MESSAGE, place)) >= 0
    ):
        recipients = list(_RECIPIENT.finditer(text, place, message))
        start = message + len(_MESSAGE)
        if recipients:
            call, start = _call(recipients[-1]["name"], text, start)
            unread += bool(call.problem)
            calls.append(dataclasses.replace(call, span=(recipients[-1].start(), start)))
        end = _END.search(text, start)
        place = end.end() if end else len(text)
    return calls


def _call(name: str, text: str, place: int) -> tuple[Call, int]:
    space = _SPACE.match(text, place)
    try:
        value, end = json_at(text, space.end() if space else place)
    except ValueError as error:
        return Call(name, problem=f"the arguments of {name} are not valid JSON ({error})"), place
    return with_arguments(name, value), end
