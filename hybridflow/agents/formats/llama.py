"""Calls as Llama 3.1 and later write them: the whole answer is {"name": ..., "parameters": {...}}, or several of them
with semicolons between; <|python_tag|> may stand before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import Call, call_format, json_call

_TAG = "<|python_tag|>"


@call_format("llama")
def llama(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """The objects of an answer that begins with one. An answer that does not, or whose object has no "name", calls
    nothing; after the tag it must."""
    del tools
    rest = text.strip()
    tagged = rest.startswith(_TAG)
    rest, calls = rest.removeprefix(_TAG).strip(), list[Call]()
    while rest.startswith("{"):
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            break
        if not isinstance(found.get("name"), str) and not tagged:
            return []
        calls.append(json_call(rest[:end], "parameters" if "parameters" in found else "arguments"))
        rest = rest[end:].strip().removeprefix(";").strip()
    if rest and (calls or tagged):
        calls.append(Call("", problem="the call is no JSON object"))
    return calls
