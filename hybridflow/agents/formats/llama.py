"""The call format of Llama 3.1 and later: the whole answer is {"name": ..., "parameters": {...}},
or several of them separated by semicolons, optionally after <|python_tag|>."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import MOST_CALLS, Call, call_format, json_at, json_call

_TAG = "<|python_tag|>"
_OBJECT = re.compile(r"[\s;]*\{")


@call_format("llama")
def llama(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the calls of an answer that begins with a JSON object. Without <|python_tag|>, an
    answer is plain text unless it begins with an object that has a "name" and either names a tool
    or has parameters. With the tag, it must contain a call.
    """
    rest = text.strip()
    offset = len(text) - len(text.lstrip())
    tagged = rest.startswith(_TAG)
    place = len(_TAG) if tagged else 0
    calls = list[Call]()
    while len(calls) < MOST_CALLS and (begin := _OBJECT.match(rest, place)):
        start = begin.end() - 1
        try:
            found, place = json_at(rest, start)
        except ValueError:
            break
        has_arguments = "parameters" not in found and "arguments" in found
        key = "arguments" if has_arguments else "parameters"
        if not tagged:
            name = found.get("name")
            if not isinstance(name, str) or (key not in found and name not in tools):
                return []
        call = json_call(found, key)
        span = (offset + start, offset + place)
        calls.append(dataclasses.replace(call, span=span))
    more = rest[place:].strip(" ;\n")
    if more and (calls or tagged) and len(calls) < MOST_CALLS:
        calls.append(Call("", problem="the call must be a JSON object"))
    return calls
