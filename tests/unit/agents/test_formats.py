"""Calls as models write them, and as they write them wrongly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.agents.formats.base import FORMATS, Call

TOOLS = {"add": ("a", "b"), "search": ("query",)}
WRITTEN = {
    "hermes": (
        "I add. <tool_call>\n{}\n</tool_call>",
        lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
    ),
    "llama": (
        "<|python_tag|>{}",
        lambda name, arguments: json.dumps({"name": name, "parameters": arguments}),
    ),
    "deepseek": (
        "I add. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        lambda name, arguments: f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```",
    ),
    "glm": (
        "I add. <tool_call>{}\n</tool_call>",
        lambda name, arguments: (
            name
            + "".join(
                f"\n<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>"
                for key, value in arguments.items()
            )
        ),
    ),
}
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>", exclude_categories=["Cs"]), max_size=20)
ARGUMENTS = st.fixed_dictionaries({"a": st.integers(), "b": PLAIN | st.floats(allow_nan=False) | st.booleans()})


@pytest.mark.parametrize("name", WRITTEN)
@given(arguments=ARGUMENTS)
def test_what_is_written_is_read(name: str, arguments: dict[str, object]) -> None:
    frame, write = WRITTEN[name]
    assert FORMATS.get(name)(frame.format(write("add", arguments)), TOOLS) == [Call("add", arguments)]


@pytest.mark.parametrize("name", [*WRITTEN, "tags"])
@given(text=st.text(max_size=60))
def test_any_text_is_read_without_an_error(name: str, text: str) -> None:
    """Rubbish gives calls with a problem, or none."""
    read = FORMATS.get(name)
    for around in ("{}", "<tool_call>{}</tool_call>", "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>", "<search>{}"):
        assert all(isinstance(call, Call) for call in read(around.replace("{}", text), TOOLS))
    assert read("The answer is 4.", TOOLS) == []


def test_several_calls_keep_their_order() -> None:
    first, second = (
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"name": "search", "parameters": {"query": "x"}}',
    )
    calls = [Call("add", {"a": 1, "b": 2}), Call("search", {"query": "x"})]
    assert FORMATS.get("llama")(f"{first}; {second}", TOOLS) == calls
    hermes = "".join(f"<tool_call>{one}</tool_call>" for one in (first, second)).replace("parameters", "arguments")
    assert FORMATS.get("hermes")(hermes, TOOLS) == calls
    newer = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>".format('{"a": 1, "b": 2}')
    assert FORMATS.get("deepseek")(newer, TOOLS) == calls[:1]
    assert FORMATS.get("tags")("<search>x</search> <search>y</search>", TOOLS) == [
        Call("search", {"query": "x"}),
        Call("search", {"query": "y"}),
    ]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add"', "is not closed"),
        ("hermes", "<tool_call>add</tool_call>", "is no JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", 'no JSON object with a "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of add are no JSON object"),
        ("llama", "<|python_tag|>add(1, 2)", "is no JSON object"),
        ("llama", '{"name": "add", "parameters": {}} and so on', "is no JSON object"),
        ("deepseek", "<｜tool▁call▁begin｜>function", "is not closed"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>"),
        ("glm", "<tool_call>add\n<arg_key>a", "is not closed"),
        ("glm", "<tool_call>add\n<arg_key>a</tool_call>", "no pairs"),
        ("tags", "<search>x", "<search> is not closed"),
        ("tags", "<add>1</add>", "takes 2 arguments"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, problem: str) -> None:
    assert problem in FORMATS.get(name)(text, TOOLS)[-1].problem


def test_an_answer_in_json_calls_no_tool_of_llama() -> None:
    assert FORMATS.get("llama")('{"answer": 4}', TOOLS) == []
