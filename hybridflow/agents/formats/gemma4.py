"""Gemma 4's call format: call:NAME and an object with unquoted keys and strings enclosed in
<|"|>."""

from __future__ import annotations

import re
from json.encoder import encode_basestring_ascii
from typing import Any

from hybridflow.agents.formats.base import FORMATS, json_at
from hybridflow.agents.json_calls import JsonCalls

_QUOTE = '<|"|>'
_MARK = re.compile(r"<\|tool_call>|<tool_call\|>")
_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\],:"\\][^{}\[\],:"\\\x00-\x1f]*+):')
_STRING = "\0"  # placeholder for a string; a NUL cannot occur in JSON or in a key


def _object_at(text: str, place: int) -> tuple[Any, int]:
    """Parse the object that starts at `place` and extends to the next call mark outside of a
    string. Returns the object and the position of that mark.

    Raises:
        ValueError: there is no object.
    """
    looked = place
    while True:
        mark = _MARK.search(text, looked)
        stop = mark.start() if mark else len(text)
        if text.count(_QUOTE, looked, stop) % 2 == 0:
            break
        closed = text.find(_QUOTE, stop)
        if closed < 0:
            raise ValueError("a string is not terminated")
        looked = closed + len(_QUOTE)
    whole = _as_json(text[place:stop])
    value, end = json_at(whole, 0)
    if whole[end:].strip():
        raise ValueError("text follows the value")
    return value, stop


def _as_json(text: str) -> str:
    """Convert the object to JSON by quoting its keys and strings. The object may contain thousands
    of strings, so the text is split in only a few passes."""
    parts = text.split(_QUOTE)
    outside = _STRING.join(parts[::2])
    if outside.count(_STRING) > len(parts) // 2:
        raise ValueError("there is a control character outside of a string")
    pieces = _KEY.split(outside)
    pieces[2::3] = [f'"{key}":' for key in pieces[2::3]]
    plain = "".join(pieces).split(_STRING)
    written = [""] * len(parts)
    written[::2] = plain
    written[1::2] = [encode_basestring_ascii(string) for string in parts[1::2]]
    return "".join(written)


FORMATS.register(
    "gemma4",
    JsonCalls(
        begin="<|tool_call>",
        header=re.compile(r"call:(?P<name>[^{<]*+)"),
        end="<tool_call|>",
        lacks="the call must begin with call:NAME",
        value=_object_at,
    ),
)
