"""Calls of every format that SGLang's parsers know are read as they read them."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from hybridflow.agents.call_reading import read_calls
from tests.unit.agents.written_calls import WRITTEN, written

pytestmark = [pytest.mark.full, pytest.mark.slow]
# our format: SGLang's parsers of it
PARSERS = {
    "hermes": ("hermes", "qwen25", "trinity"),
    "llama": ("llama3",),
    "deepseek": ("deepseekv3", "deepseekv31"),
    "deepseek_v32": ("deepseekv32", "deepseekv4"),
    "glm": ("glm45", "glm47", "ling3"),
    "qwen3_coder": ("qwen3_coder", "step3p5", "mimo"),
    "minimax": ("minimax-m2",),
    "kimi": ("kimi_k2",),
    "kimi_k3": ("kimi_k3",),
    "minimax_m3": ("minimax-m3",),
    "gemma4": ("gemma4",),
    "mistral": ("mistral",),
    "harmony": ("gpt-oss",),
    "step3": ("step3",),
    "pythonic": ("pythonic",),
}
# forms that its parser reads and `WRITTEN` does not have
FORMS = {
    "glm47": (
        "I add.<tool_call>{}</tool_call>",
        lambda called, given: (
            called
            + "".join(
                f"<arg_key>{key}</arg_key><arg_value>{written(value)}</arg_value>"
                for key, value in given.items()
            )
        ),
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        lambda called, given: f"{called}<｜tool▁sep｜>{json.dumps(given)}",
    ),
    "deepseekv4": (
        "I add.\n\n<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>",
        WRITTEN["deepseek_v32"][1],
    ),
    "gpt-oss": (
        (
            "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            "{}<|call|>"
        ),
        lambda called, given: (
            f"to=functions.{called} <|constrain|>json<|message|>{json.dumps(given)}"
        ),
    ),
}
KINDS = {
    "text": "string",
    "number": "integer",
    "share": "number",
    "flag": "boolean",
    "items": "array",
    "more": "object",
}
PARTS: dict[str, dict[str, Any]] = {
    "items": {"items": {"type": "integer"}},
    "more": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"type": "string"}},
        }
    },
}
PROPERTIES = {name: {"type": kind, **PARTS.get(name, {})} for name, kind in KINDS.items()}
DECLARED = {"look_up": {"type": "object", "properties": PROPERTIES}}


def some_text(draw: random.Random) -> str:
    letters = string.ascii_letters + string.digits + " .,;:!?-äß中文'()" + '"'
    return "t" + "".join(draw.choices(letters, k=draw.randrange(30))) + "t"


def arguments(draw: random.Random) -> dict[str, Any]:
    found = {
        "text": some_text(draw),
        "number": draw.randrange(-1000, 1000),
        "share": draw.randrange(1, 1000) / 8 + 1 / 16,
        "flag": draw.random() < 0.5,
        "items": [draw.randrange(9) for _ in range(draw.randrange(4))],
        "more": {"a": draw.randrange(9), "b": [some_text(draw)]},
    }
    return {
        name: found[name] for name in draw.sample(list(found), draw.randrange(1, len(found) + 1))
    }


def theirs(parser: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [
        Tool(type="function", function=Function(name=name, parameters=one))
        for name, one in DECLARED.items()
    ]
    _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    return [(str(call.name), json.loads(call.parameters)) for call in calls]


@pytest.mark.parametrize(
    ("name", "parser"), [(name, one) for name, several in PARSERS.items() for one in several]
)
def test_calls_are_read_as_sglang_reads_them(name: str, parser: str) -> None:
    frame, write = FORMS.get(parser, WRITTEN[name])
    draw = random.Random(parser)
    missed = 0
    for _ in range(200):
        given = arguments(draw)
        text = frame.replace("{}", write("look_up", given))
        ours = [
            (call.name, dict(call.arguments))
            for call in read_calls(name, text, DECLARED)
            if not call.problem
        ]
        assert ours == [("look_up", given)], text
        found = theirs(parser, text)
        missed += not found
        assert found in (ours, []), text
    assert missed <= (100 if parser == "pythonic" else 0)  # its pattern stops at some punctuation
