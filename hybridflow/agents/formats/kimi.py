"""Kimi-K2's call format: an id of the form functions.NAME:INDEX, followed by JSON arguments. The id
is passed to the chat template along with the result.
"""

from __future__ import annotations

import re

from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.json_calls import JsonCalls

_ARGUMENTS = "<|tool_call_argument_begin|>"

FORMATS.register(
    "kimi",
    JsonCalls(
        begin="<|tool_call_begin|>",
        header=re.compile(rf"(?P<id>[^<]*+){re.escape(_ARGUMENTS)}\s*"),
        end="<|tool_call_end|>",
        lacks=f"the call is missing {_ARGUMENTS}",
        name_in_id=re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?"),
    ),
)
