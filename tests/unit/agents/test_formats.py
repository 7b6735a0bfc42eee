"""Calls as models write them, and as they write them wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.agents.call_reading import format_of, read_calls
from hybridflow.agents.formats.base import FORMATS, Call
from tests.unit.agents.written_calls import DECLARED, TAGS, TOOLS, WRITTEN
from tests.unit.data.chat_tokenizers import TEMPLATES, tokenizer_with

TAGGED = ("glm", "qwen3_coder", "seed_oss", "minimax", "minimax_m3", "step3")
PLAIN = st.text(
    st.characters(codec="utf-8", exclude_characters="<>", exclude_categories=["Cs"]), max_size=20
)
ARGUMENTS = st.fixed_dictionaries(
    {
        "a": st.integers(),
        "b": PLAIN | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
@given(arguments=ARGUMENTS)
def test_what_is_written_is_read(name: str, arguments: dict[str, object]) -> None:
    frame, write = WRITTEN[name]
    [call] = read_calls(name, frame.replace("{}", write("add", arguments)), DECLARED)
    known = (
        arguments
        if name not in TAGGED or not isinstance(arguments["b"], str)
        else {"a": arguments["a"]}
    )
    assert (call.name, call.problem) == ("add", "") and call.arguments.items() >= known.items()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS.names())
@given(text=st.text(max_size=60))
def test_any_text_is_read_without_an_error(name: str, text: str) -> None:
    """Rubbish gives calls with a problem, or none."""
    read = FORMATS.get(name)
    frames = (frame for frame, _ in WRITTEN.values())
    for around in ("{}", "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>", "<search>{}", *frames):
        assert all(isinstance(call, Call) for call in read(around.replace("{}", text), TOOLS))
    assert read("The answer is 4.", TOOLS) == []


def test_several_calls_keep_their_order() -> None:
    first = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    second = '{"name": "search", "parameters": {"query": "x"}}'
    calls = [Call("add", {"a": 1, "b": 2}), Call("search", {"query": "x"})]
    assert FORMATS.get("llama")(f"{first}; {second}", TOOLS) == calls
    hermes = "".join(f"<tool_call>{one}</tool_call>" for one in (first, second)).replace(
        "parameters", "arguments"
    )
    assert FORMATS.get("hermes")(hermes, TOOLS) == calls
    lines = (
        '<function_calls>\nadd(a=1, b={"c": [null, true]})\n search(query="x")\n</function_calls>'
    )
    listed = [Call("add", {"a": 1, "b": {"c": [None, True]}}), Call("search", {"query": "x"})]
    assert FORMATS.get("olmo3")(lines, TOOLS) == listed
    newer = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>".format('{"a": 1, "b": 2}')
    assert FORMATS.get("deepseek")(newer, TOOLS) == calls[:1]
    assert FORMATS.get("tags")("<search>x</search> <search>y</search>", TOOLS) == [
        Call("search", {"query": "x"}, is_text=True),
        Call("search", {"query": "y"}, is_text=True),
    ]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add"', "is not closed"),
        ("hermes", "<tool_call>add</tool_call>", "is not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", 'must be a JSON object with a "name"'),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "arguments of add must be a JSON object",
        ),
        ("llama", "<|python_tag|>add(1, 2)", "must be a JSON object"),
        ("llama", '{"name": "add", "parameters": {}} and so on', "must be a JSON object"),
        ("deepseek", "<｜tool▁call▁begin｜>function", "is not closed"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "is missing <｜tool▁sep｜>"),
        ("glm", "<tool_call>add\n<arg_key>a", "is not closed"),
        ("glm", "<tool_call>add\n<arg_key>a</tool_call>", "must be written as pairs"),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>1</function></tool_call>",
            "is not closed",
        ),
        ("minimax", "<minimax:tool_call>add(1)</minimax:tool_call>", "contains no call"),
        (
            "kimi",
            "<|tool_call_begin|>functions.add:0<|tool_call_end|>",
            "is missing <|tool_call_argument_begin|>",
        ),
        ("mistral", "[TOOL_CALLS]add(1)", "is not valid JSON"),
        ("minimax_m3", "]<]minimax[>[<tool_call>add(1)", "contains no call"),
        (
            "minimax_m3",
            ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="add">1',
            "is not closed",
        ),
        ("kimi_k3", "<|open|>tools<|sep|>add(1)", "contains no call"),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>1',
            "is not closed",
        ),
        ("gemma4", "<|tool_call>add{a:1}<tool_call|>", "must begin with call:NAME"),
        ("gemma4", "<|tool_call>call:add{a:1", "is not closed"),
        ("gemma4", '<|tool_call>call:add{a:<|"|>1}<tool_call|>', "not valid JSON"),
        (
            "harmony",
            " to=functions.add<|channel|>commentary json<|message|>{",
            "arguments of add are not valid JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "NaN is not a JSON number",
        ),
        ("hermes", '<tool_call>{"name": "add"} and</tool_call>', "text follows the value"),
        ("deepseek_v32", '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a">', "not closed"),
        ("step3", "<｜tool_calls_begin｜>add(1)", "contains no call"),
        ("pythonic", "[add(1, 2)]", "must be passed by name"),
        ("pythonic", "[add(a=1", "expected a list of Python calls"),
        ("olmo3", "<function_calls>add(a=1", "expected one Python call per line"),
        ("olmo3", "<function_calls>import os</function_calls>", "something other than a call"),
        ("olmo3", "<function_calls>add(a=[true, nothing])", "a of add must be a literal"),
        ("pythonic", "<|python_start|>[add(a=b)]<|python_end|>", "a of add must be a literal"),
        ("pythonic", "[add(a=1e999), 5]", "something other than calls"),
        ("tags", "<search>x", "<search> is not closed"),
        ("tags", "<add>1</add>", "takes 2 arguments"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, problem: str) -> None:
    assert problem in FORMATS.get(name)(text, TOOLS)[-1].problem


def test_an_answer_in_json_calls_no_tool_of_llama() -> None:
    assert FORMATS.get("llama")('{"answer": 4}', TOOLS) == []


HOSTILE = (
    "end with </tool_call> please",
    '"}}</tool_call>',
    "<｜tool▁call▁end｜> <|tool_call_end|> <|call|> </parameter> </arg_value> </function>",
    "[TOOL_CALLS] [ARGS] <|message|> ```",
    "<tool_call>",
)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("text", HOSTILE)
def test_an_argument_may_hold_what_closes_a_call(name: str, text: str) -> None:
    frame, write = WRITTEN[name]
    calls = read_calls(name, frame.replace("{}", write("search", {"query": text})), DECLARED)
    assert [(call.name, dict(call.arguments), call.problem) for call in calls] == [
        ("search", {"query": text}, "")
    ]


def test_a_program_in_tags_may_hold_its_closing_tag() -> None:
    read = FORMATS.get("tags")
    calls = read(
        '<python>print("</python>")</python> then <search>x</search>',
        {**TOOLS, "python": ("code",)},
    )
    assert [dict(call.arguments) for call in calls] == [
        {"code": 'print("</python>")'},
        {"query": "x"},
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_thought_calls_nothing(name: str) -> None:
    frame, write = WRITTEN[name]
    draft, real = (
        frame.replace("{}", write("search", {"query": text})) for text in ("draft", "real")
    )
    if name == "harmony":
        draft = f"<|channel|>analysis<|message|>{write('search', {'query': 'draft'})[:20]}<|end|>"
    for thinking_open, answer in (
        (False, f"<think>{draft}</think>\n\n{real}"),
        (True, f"{draft}</think>{real}"),
    ):
        calls = read_calls(name, answer, DECLARED, thinking_open=thinking_open)
        assert [dict(call.arguments) for call in calls] == [{"query": "real"}]
    assert read_calls(name, f"<think>{draft}", DECLARED) == []


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12345", "12345"),
        ({"type": "string"}, " a\nb ", " a\nb "),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "string"}, '"5"', '"5"'),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({}, "5", 5),
        ({}, "five", "five"),
    ],
)
def test_arguments_have_the_types_that_a_tool_declares(
    schema: dict[str, object], text: str, value: object
) -> None:
    declared = {"search": {"properties": {"query": schema}}}
    for name in TAGGED:
        frame, write = WRITTEN[name]
        [call] = read_calls(name, frame.replace("{}", write("search", {"query": text})), declared)
        assert (
            call.problem == ""
            and call.arguments == {"query": value}
            and type(call.arguments["query"]) is type(value)
        )


def test_an_argument_of_another_type_is_told() -> None:
    [call] = read_calls(
        "hermes", '<tool_call>{"name": "search", "arguments": {"limit": "5"}}</tool_call>', DECLARED
    )
    assert call.arguments == {"limit": 5}
    [call] = read_calls(
        "hermes", '<tool_call>{"name": "search", "arguments": {"limit": "x"}}</tool_call>', DECLARED
    )
    assert call.problem == "the argument limit of search must be integer, not 'x'"


def test_an_object_that_names_no_tool_and_has_no_parameters_is_an_answer() -> None:
    assert FORMATS.get("llama")('{"name": "Bingo", "age": 30}', TOOLS) == []
    assert FORMATS.get("llama")('{"name": "search"}', TOOLS) == [Call("search")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("Qwen-QwQ-32B", "hermes"),
        ("Qwen3-Coder", "qwen3_coder"),
        ("GLM-4.6", "glm"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek"),
        ("moonshotai-Kimi-K2", "kimi"),
        ("MiniMax-M2", "minimax"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("openai-gpt-oss-120b", "harmony"),
        ("ByteDance-Seed-OSS", "seed_oss"),
        ("Apertus-8B-Instruct", None),
    ],
)
def test_the_format_of_a_template_is_recognised(template: str, name: str | None) -> None:
    tokenizer = tokenizer_with(TEMPLATES[template])
    assert format_of(tokenizer.template.example_call) == name


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("text", ["\n<think>\nx", "[THINK] x", "a\n</think>\nb", "<think>"])
def test_an_argument_may_hold_a_marker_of_a_thinking(name: str, text: str) -> None:
    """Also far from a quotation mark, and after a thinking."""
    frame, write = WRITTEN[name]
    query = f"{'long ' * 100}{text}"
    for before in ("", "<think>no</think>\n"):
        answer = before + frame.replace("{}", write("search", {"query": query}))
        assert [dict(call.arguments) for call in read_calls(name, answer, DECLARED)] == [
            {"query": query}
        ]


@pytest.mark.parametrize("name", ["hermes", "kimi", "mistral", "harmony"])
def test_reading_stops_after_many_calls_that_cannot_be_read(name: str) -> None:
    frame, write = WRITTEN[name]
    broken, whole = (frame.replace("{}", write("search", {"query": text})) for text in ("NaN", "x"))
    broken = broken.replace('"NaN"', "NaN")
    few, many = (read_calls(name, broken * number + whole, DECLARED) for number in (99, 200))
    assert (
        few[-1].arguments == {"query": "x"}
        and [bool(call.problem) for call in many] == [True] * 100
    )


def test_a_number_that_is_not_finite_is_told() -> None:
    [call] = read_calls(
        "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', DECLARED
    )
    assert "1e999 is not a JSON number" in call.problem


@pytest.mark.parametrize("name", FORMATS.names())
def test_a_thousand_calls_of_an_answer_that_repeats_itself_are_read(name: str) -> None:
    frame, write = {**WRITTEN, "tags": TAGS}[name]
    one = write("search", {"query": "x"})
    answer = frame.replace("{}", one) * 1500
    if name in ("pythonic", "olmo3"):
        answer = frame.replace("{}", (", " if name == "pythonic" else "\n").join([one] * 1500))
    answer = f"{one};" * 1500 if name == "llama" else answer
    calls = FORMATS.get(name)(answer, TOOLS)
    assert len(calls) == 1000 and all(call.arguments == {"query": "x"} for call in calls)
