"""Parsing of tool calls in an answer. Calls inside a thinking block are ignored, and arguments are
converted to the types that the tools declare.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hybridflow.agents.formats.base import FORMATS, MOST_CALLS, Call, json_at
from hybridflow.rewards.reading import DRIVER_CHARACTERS, has_markers, read_response

Schema = Mapping[str, Any]
T = TypeVar("T")
_EMPTY: Mapping[str, Callable[[], Any]] = {"array": list, "object": dict}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def read_calls(
    call_format: str, answer: str, tools: Mapping[str, Schema], *, thinking_open: bool = False
) -> list[Call]:
    """Parse the calls in an answer, in order. Text inside a thinking block is never parsed as a
    call, and a thinking marker inside an argument does not open a block.

    Args:
        call_format: `rollout.agent.call_format`.
        tools: the JSON schema for the arguments of each tool, keyed by tool name.
        thinking_open: True if the answer starts inside a thinking block.
    """
    names = {}
    for name, schema in tools.items():
        names[name] = tuple(schema.get("properties") or ())
    read = FORMATS.get(call_format)
    spans = [call.span for call in read(answer, names)] if has_markers(answer) else []
    spoken = read_response(answer, thinking_open, spans).answer
    calls = read(spoken, names)[:MOST_CALLS]
    return [_typed(call, tools.get(call.name, {})) for call in calls]


async def while_others_go_on(read: Callable[[str], T], answer: str) -> T:
    """Return `read(answer)`. Long answers are parsed in a thread so that they do not block other
    conversations.
    """
    if len(answer) <= DRIVER_CHARACTERS:
        return read(answer)
    return await asyncio.to_thread(read, answer)


@functools.cache
def format_of(example: str) -> str | None:
    """Return the built-in format that parses `example` as a call to `lookup` with {"key": "value"},
    or None if no format does.
    """
    schema = {"properties": {"key": {"type": "string"}}}
    wanted = [("lookup", {"key": "value"}, "")]
    for name in FORMATS.names():
        calls = read_calls(name, example, {"lookup": schema})
        found = [(call.name, dict(call.arguments), call.problem) for call in calls]
        if found == wanted:
            return name
    return None


def _typed(call: Call, schema: Schema) -> Call:
    declared = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        own = declared.get(name)
        kinds = _kinds(own)
        # a JSON string stays text if the schema allows a string
        is_said = "string" in kinds or not kinds
        if not isinstance(value, str) or (is_said and not call.is_text):
            arguments[name] = _fitted(value, own) if call.is_text else value
            continue
        arguments[name] = _value(value, kinds)
        if kinds and not _is_any(arguments[name], kinds):
            allowed = " or ".join(sorted(kinds))
            problem = f"the argument {name} of {call.name} must be {allowed}, not {value!r:.80}"
            return dataclasses.replace(call, problem=problem)
    return dataclasses.replace(call, arguments=arguments, is_text=False)


def _fitted(value: Any, schema: Any) -> Any:
    """Convert the strings nested in a value to the types declared by the schema."""
    inner = _mapping(schema)
    if isinstance(value, list):
        of_items = inner.get("items")
        return [_fitted(one, of_items) for one in value]
    if isinstance(value, dict):
        declared = _mapping(inner.get("properties"))
        return {name: _fitted(one, declared.get(name)) for name, one in value.items()}
    return _value(value, _kinds(inner))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kinds(schema: Any) -> frozenset[str]:
    """Return the types that a schema allows; empty if it declares none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list):
            parts = list(map(_kinds, choices))
            return frozenset().union(*parts) if all(parts) else frozenset()
    kind = schema.get("type")
    values = schema.get("enum")
    if kind is None and isinstance(values, list):
        return frozenset(name for name in _KINDS if any(_is(value, name) for value in values))
    listed = kind if isinstance(kind, list) else [kind]
    found = frozenset(one for one in listed if isinstance(one, str))
    return found if found <= _KINDS.keys() else frozenset()


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])


def _is_any(value: Any, kinds: frozenset[str]) -> bool:
    return any(_is(value, kind) for kind in kinds)


def _value(text: str, kinds: frozenset[str]) -> Any:
    """Parse the text as one of the given types, or return it unchanged if that fails."""
    plain = text.strip()
    if not plain and len(kinds) == 1:
        empty = _EMPTY.get(*kinds)
        if empty is not None:
            return empty()
    try:
        found, end = json_at(plain, 0)
        if end != len(plain):
            found = text
    except ValueError:
        found = _WORDS.get(plain.lower(), text) if kinds else text
    if isinstance(found, str) and found != text and kinds:
        # the quotation marks belong to a text, and not to a number
        return text if "string" in kinds else _value(found, kinds)
    if "integer" in kinds and isinstance(found, float) and found.is_integer():
        return int(found)
    return found if not kinds or _is_any(found, kinds) else text
