"""Mistral's call format: [TOOL_CALLS], followed either by a list of objects or, for each call, by a
name, [ARGS] and an object.
"""

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
    json_call,
    with_arguments,
)

_BEGIN = "[TOOL_CALLS]"
_SPACE = re.compile(r"\s*")
_HEADER = re.compile(r"(?P<name>[^\[{]*)(?:\[CALL_ID\](?P<id>[^\[{]*))?(?:\[ARGS\])?\s*")


@call_format("mistral")
def mistral(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the calls after each [TOOL_CALLS]. Stops after `MOST_UNREAD` unparsable calls."""
    del tools
    calls = list[Call]()
    unread = 0
    place = text.find(_BEGIN)
    while place >= 0 and unread < MOST_UNREAD and len(calls) < MOST_CALLS:
        found, end = _calls(text, place + len(_BEGIN))
        calls += [dataclasses.replace(call, span=(place, end)) for call in found]
        unread += any(call.problem for call in found)
        place = text.find(_BEGIN, end)
    return calls


def _calls(text: str, place: int) -> tuple[list[Call], int]:
    space = _SPACE.match(text, place)
    start = space.end() if space else place
    name = ""
    header = None if text.startswith("[", start) else _HEADER.match(text, start)
    if header:
        name = header["name"].strip()
        start = header.end()
    try:
        value, end = json_at(text, start)
    except ValueError as error:
        return [Call(name, problem=f"the call is not valid JSON ({error})")], place
    if header:
        number = (header["id"] or "").strip()
        return [with_arguments(name, value, number)], end
    listed = value if isinstance(value, list) else [value]
    return [_named(json_call(one, "arguments"), one) for one in listed], end


def _named(call: Call, value: object) -> Call:
    number = value.get("id") if isinstance(value, dict) else None
    if not isinstance(number, str):
        return call
    return Call(call.name, call.arguments, call.problem, number)
