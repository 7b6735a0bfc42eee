"""DeepSeek's call format, enclosed in the model's tool-call tokens: `function SEP name, ```json
block` (V3, R1) and `name SEP json` (V3.1).
"""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.json_calls import JsonCalls

_BEGIN, _SEPARATOR, _END = (f"<｜tool▁{word}｜>" for word in ("call▁begin", "sep", "call▁end"))

FORMATS.register(
    "deepseek",
    JsonCalls(
        begin=_BEGIN,
        header=re.compile(
            rf"(?P<kind>[^<]*+){_SEPARATOR}\s*+(?:(?P<name>[^\n`{{<]*+)\n```(?:json)?)?\s*+"
        ),
        end=_END,
        lacks=f"the call is missing {_SEPARATOR}",
        fence="```",
    ),
)
