"""Calls as Gemma 4 writes them: call:NAME and an object whose keys have no quotation marks, and whose strings stand
between <|"|>."""

from __future__ import annotations

import json
import re
from typing import Any

from hybridflow.agents.formats.base import FORMATS, json_at
from hybridflow.agents.json_calls import JsonCalls

_PIECE = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<sign>[{}\[\],:])|(?P<bare>(?:[^{}\[\],:<]|<(?!\|))++)', re.DOTALL)
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?")


def _object_at(text: str, place: int) -> tuple[Any, int]:
    """The object that begins at `place`, and where it ends. ValueError: there is none. It is written anew as JSON."""
    written, depth = list[str](), 0
    while piece := _PIECE.match(text, place):
        place = piece.end()
        if sign := piece["sign"]:
            depth += (sign in "{[") - (sign in "}]")
            written.append(sign)
            if depth <= 0:
                break
        elif piece["text"] is not None:
            written.append(json.dumps(piece["text"]))
        elif word := piece["bare"].strip():
            is_value = _WORD.fullmatch(word) and text[place : place + 1] != ":"
            written.append(word if is_value else json.dumps(word))
    whole = "".join(written)
    value, end = json_at(whole, 0)
    if end != len(whole):
        raise ValueError("text follows the value")
    return value, place


FORMATS.register(
    "gemma4",
    JsonCalls(
        begin="<|tool_call>",
        header=re.compile(r"call:(?P<name>[^{<]*+)"),
        end="<tool_call|>",
        lacks="the call does not begin with call:NAME",
        value=_object_at,
    ),
)
