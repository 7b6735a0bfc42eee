"""The call format of DeepSeek-V3.2 and later: invoke tags whose parameters are marked as text or
JSON."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.tagged_calls import TaggedCalls, json_or_text

_MARK = "｜DSML｜"


def _value(key: re.Match[str], text: str) -> Any:
    return text if key["text"] == "true" else json_or_text(text)


FORMATS.register(
    "deepseek_v32",
    TaggedCalls(
        begin=re.compile(rf"""<{_MARK}invoke name="(?P<name>[^"<>]*+)"\s*+>"""),
        key=re.compile(
            rf"""\s*+<{_MARK}parameter name="(?P<key>[^"<>]*+)" """
            r"""string="(?P<text>true|false)"\s*+>"""
        ),
        value_end=re.compile(rf"</{_MARK}parameter>(?=\s*+(?:<{_MARK}parameter|</{_MARK}invoke>))"),
        end=f"</{_MARK}invoke>",
        example='<｜DSML｜parameter name="key" string="true"> blocks',
        value=_value,
        is_text=False,
    ),
)
