"""Calls as Gemma 4 writes them: call:NAME and an object whose keys have no quotation marks, and
whose strings stand between <|"|>."""

from __future__ import annotations

import re
from json.encoder import encode_basestring_ascii
from typing import Any

from hybridflow.agents.formats.base import FORMATS, json_at
from hybridflow.agents.json_calls import JsonCalls

_MARK = re.compile(r'(?P<quote><\|"\|>)|<\|tool_call>|<tool_call\|>')
_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\],:"\\][^{}\[\],:"\\\x00-\x1f]*+):')


def _object_at(text: str, place: int) -> tuple[Any, int]:
    """The object from `place` to the next mark of a call, and where that begins. ValueError: there
    is none.

    It is written anew as JSON: keys and strings between quotation marks.
    """
    written = list[str]()
    while (mark := _MARK.search(text, place)) and mark["quote"]:
        closed = text.find(mark["quote"], mark.end())
        if closed < 0:
            raise ValueError("a string is not closed")
        written += [
            _with_keys(text[place : mark.start()]),
            encode_basestring_ascii(text[mark.end() : closed]),
        ]
        place = closed + len(mark["quote"])
    stop = mark.start() if mark else len(text)
    whole = "".join([*written, _with_keys(text[place:stop])])
    value, end = json_at(whole, 0)
    if whole[end:].strip():
        raise ValueError("text follows the value")
    return value, stop


def _with_keys(plain: str) -> str:
    return plain if ":" not in plain else _KEY.sub(r'\1"\2":', plain)


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
