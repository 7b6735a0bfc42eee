"""Conversations as tokens: what the engine is asked, what the batch holds, and what a chat template
would have written of the same messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridflow.agents.conversation import Conversation, ConversationOver
from hybridflow.agents.loops.base import LOOPS
from hybridflow.agents.tools.base import Toolbox
from hybridflow.data.chat_template import Exchange
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from tests.unit.agents.talks import FAMILIES, Engine, byte_tokenizer, conversation
from tests.unit.data.chat_tokenizers import TEMPLATES, tokenizer_with


@pytest.fixture(params=FAMILIES)
def tokenizer(request: Any, tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, *FAMILIES[request.param])


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """All of it, special tokens too."""
    return str(
        tokenizer._hf.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


async def talk(held: Conversation, *observations: Sequence[str]) -> None:
    await held.answer()
    for texts in observations:
        held.observe(texts)
        await held.answer()


@pytest.mark.slow
def test_the_tokens_are_what_the_engine_saw_and_what_the_template_writes(
    tokenizer: Tokenizer,
) -> None:
    engine = Engine(tokenizer, "I ask for it.", "And once more", "It is 408.")
    held = conversation(tokenizer, engine)
    asyncio.run(talk(held, ["408"], ["four", "hundred"]))
    assert held.answered == 3 and held.room == 1000 - len(held.tokens)
    whole = [*held.prompt, *held.tokens]
    for number, (asked, most) in enumerate(engine.asked):
        assert whole[: len(asked)] == asked and most == 1000 - (len(asked) - len(held.prompt)), (
            number
        )
    sampled = [token for token, own in zip(held.tokens, held.mask, strict=True) if own]
    assert sampled == [
        token
        for text in ("I ask for it.", "And once more", "It is 408.")
        for token in (*tokenizer.encode(text), tokenizer.eos_id)
    ]
    shown = [
        (value, version)
        for value, version, own in zip(held.log_probs, held.versions, held.mask, strict=True)
        if not own
    ]
    assert set(shown) == {(0.0, 7)}
    messages = [{"role": "user", "content": "What is 12 * 34?"}, *held.messages]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    # the oracle: the template over all messages but the last answer, whose text the engine then
    # sampled
    assert text_of(tokenizer, whole[:-1]) == tokenizer.render_chat(messages[:-1]) + "It is 408."


@pytest.mark.slow
def test_a_tool_cannot_speak_for_another_role(tokenizer: Tokenizer) -> None:
    special = text_of(tokenizer, [tokenizer.eos_id])
    engine = Engine(tokenizer, "call", "done")
    held = conversation(tokenizer, engine)
    plain = tokenizer.continuation([Exchange([{"role": "tool", "content": "x"}])], tokenizer.eos_id)
    asyncio.run(talk(held, [f"x{special}x"]))
    shown = [token for token, own in zip(held.tokens, held.mask, strict=True) if not own]
    assert shown.count(tokenizer.eos_id) == plain.count(tokenizer.eos_id)
    assert special in text_of(tokenizer, shown)


@pytest.mark.slow
def test_limits(tokenizer: Tokenizer) -> None:
    long = "x" * 500
    held = conversation(
        tokenizer, Engine(tokenizer, "a", "b", "c"), max_answers=2, max_observation_tokens=10
    )
    with pytest.raises(ConversationOver, match="max_answers=2"):
        asyncio.run(talk(held, [long], [long]))
    assert held.finish_reason == "stop" and held.mask.count(False) <= 2 * 80
    held = conversation(tokenizer, Engine(tokenizer, "a", "b"), room=100)
    with pytest.raises(ConversationOver, match="no room"):
        asyncio.run(talk(held, [long]))
    # what does not fit is not shown in part
    assert held.finish_reason == "length" and len(held.tokens) == 2
    held = conversation(tokenizer, Engine(tokenizer, long), room=100)
    with pytest.raises(ConversationOver, match="cut off"):
        asyncio.run(talk(held, ["x"]))
    assert held.finish_reason == "length" and len(held.tokens) == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        (
            "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% "
            "endfor %}"
        ),
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        (
            "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' else "
            "m.content }}{% endfor %}"
        ),
    ],
)
def test_a_template_that_does_not_show_what_was_said_is_refused(
    tmp_path: Path, template: str
) -> None:
    found = byte_tokenizer(tmp_path, ["<e>"], "<e>", template)
    with pytest.raises(DataError, match=r"observation_role|rejected the messages"):
        found.template.check("tool")


KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:{}<|tool_call_argument_begin|>"
    '{{"expression": "12 * 34"}}<|tool_call_end|><|tool_calls_section_end|>'
)
CODER_CALL = (
    "<tool_call>\n<function=calculator>\n<parameter=expression>\n12 * "
    "34\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("template", "call_format", "call", "shown"),
    [
        (
            "moonshotai-Kimi-K2",
            "kimi",
            KIMI_CALL.format(0),
            "tool<|im_middle|>## Return of functions.calculator:0\\n408",
        ),
        (
            "Qwen3.5-4B",
            "qwen3_coder",
            f"I draft {CODER_CALL}.</think>\n\n{CODER_CALL}",
            "<tool_response>\n408\n</tool",
        ),
        (
            "openai-gpt-oss-120b",
            "harmony",
            (
                ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "12 * '
                '34"}'
            ),
            'functions.calculator to=assistant<|channel|>commentary<|message|>"408"<|end|>',
        ),
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            "mistral",
            '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "12 * 34"}}]',
            '[TOOL_RESULTS]{"content": 408, "call_id": "c00010000"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_calls_and_their_ids_reach_the_template(
    template: str, call_format: str, call: str, shown: str
) -> None:
    """The loop `tools` with the formats of four families: each call is run once, and its result is
    shown as theirs."""
    found = tokenizer_with(TEMPLATES[template])
    held = conversation(
        found, Engine(found, call, "It is 408."), call_format=call_format, tools=("calculator",)
    )
    tools = Toolbox(held.config, thinking_open=found.template.opens_thinking)
    found.tools = tools.schemas()
    asyncio.run(LOOPS.get("tools").function(held, tools))
    assert (held.calls, held.answered) == (1, 2)
    between = [token for token, own in zip(held.tokens, held.mask, strict=True) if not own]
    assert shown in text_of(found, between)


def test_half_a_surrogate_pair_in_an_observation_is_shown_and_recorded(
    tokenizer: Tokenizer,
) -> None:
    held = conversation(tokenizer, Engine(tokenizer, "call", "done"))
    asyncio.run(talk(held, ["a\ud800b"]))
    assert held.messages[1]["content"] == "a\ufffdb" and "a\ufffdb" in text_of(
        tokenizer, held.tokens
    )
