"""Kimi-K3's call format: a section of tags whose arguments are marked as text or JSON."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls, json_or_text


def _value(key: re.Match[str], text: str) -> Any:
    return text if key["type"] == "string" else json_or_text(text)


FORMATS.register(
    "kimi_k3",
    TaggedCalls(
        begin=re.compile(r"""<\|open\|>call\s++tool="(?P<name>[^"<>]*+)"[^<]*+<\|sep\|>"""),
        key=re.compile(
            r"""\s*+<\|open\|>argument\s++key="(?P<key>[^"<>]*+)"\s++"""
            r"""type="(?P<type>[^"<>]*+)"<\|sep\|>"""
        ),
        value_end=re.compile(
            r"<\|close\|>argument<\|sep\|>(?=\s*+<\|(?:open\|>argument\s|close\|>call<\|sep\|>))"
        ),
        end="<|close|>call<|sep|>",
        example='<|open|>argument key="key" type="string"<|sep|> blocks',
        section="<|open|>tools<|sep|>",
        value=_value,
        is_text=False,
    ),
)
