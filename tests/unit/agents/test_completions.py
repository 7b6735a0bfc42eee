"""Conversations behind OpenAI's interface, asked by the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from hybridflow.agents.completions import CompletionServer
from hybridflow.agents.conversation import Conversation, ConversationOver, Endpoint
from hybridflow.data.tokenizer import Tokenizer
from tests.unit.agents.talks import FAMILIES, Engine, byte_tokenizer, conversation

QUESTION: list[Any] = [{"role": "user", "content": "What is 12 * 34?"}]
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
Program = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, *FAMILIES[request.param])


@pytest.fixture
def chatml(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, *FAMILIES["chatml"])


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=120.0, max_retries=0)


def served(held: Conversation, program: Program) -> Any:
    """What a program returns that talks to the conversation over HTTP."""

    async def run() -> Any:
        server = CompletionServer()
        held.endpoint = server.endpoint
        try:
            async with held.serve() as endpoint, client_of(endpoint) as client:
                return await program(client)
        finally:
            await server.close()

    return asyncio.run(run())


async def asked(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def with_a_tool(client: openai.AsyncOpenAI) -> str:
    """An agent as one finds it in the manuals: ask, run the tools that are called, show the results, ask again."""
    messages = list(QUESTION)
    while True:
        message = (await asked(client, messages, tools=TOOLS)).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] * given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_a_program_with_a_tool_leaves_the_tokens_that_the_engine_saw(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, CALL, "It is 408.")
    held = conversation(tokenizer, engine)
    assert served(held, with_a_tool) == "It is 408."
    by_hand = conversation(tokenizer, Engine(tokenizer, CALL, "It is 408."))

    async def the_same() -> None:
        await by_hand.answer()
        by_hand.observe(["408"])
        await by_hand.answer()

    asyncio.run(the_same())
    assert (held.tokens, held.mask, held.log_probs, held.versions) == (
        by_hand.tokens,
        by_hand.mask,
        by_hand.log_probs,
        by_hand.versions,
    )
    assert (held.answered, held.calls, held.messages) == (2, 1, by_hand.messages)
    assert engine.asked[1][0] == [*held.prompt, *held.tokens][: len(engine.asked[1][0])]


def test_a_streamed_answer_is_the_same_in_pieces(chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> tuple[str, list[Any], str, int]:
        text, calls, reason, tokens = "", [], "", 0
        options = {"include_usage": True}
        async for chunk in await asked(client, QUESTION, tools=TOOLS, stream=True, stream_options=options):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reason = choice.finish_reason or reason
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, calls, reason, tokens

    held = conversation(chatml, Engine(chatml, CALL))
    text, [call], reason, tokens = served(held, program)
    assert (text, reason, tokens) == (CALL, "tool_calls", len(held.tokens))
    assert json.loads(call.function.arguments) == {"a": 12, "b": 34}


def test_an_answer_is_as_long_as_the_program_asks_and_its_end_is_told(chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> Any:
        return await asked(client, QUESTION, max_tokens=4)

    engine = Engine(chatml, "It is 408.")
    found = served(conversation(chatml, engine), program)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("It i", "length")
    assert engine.asked[0][1] == 4 and found.usage.completion_tokens == 4


def test_who_asks_the_same_again_is_given_the_same_answer(chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> list[str]:
        both = await asyncio.gather(asked(client, QUESTION), asked(client, QUESTION))
        return [one.choices[0].message.content for one in (*both, await asked(client, QUESTION))]

    held = conversation(chatml, Engine(chatml, "only once"))
    assert served(held, program) == ["only once"] * 3
    assert held.answered == 1


ANSWERED: list[Any] = [*QUESTION, {"role": "assistant", "content": "It is 408."}]
MORE: dict[str, Any] = {"role": "tool", "tool_call_id": "x", "content": "no"}


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        ([{"role": "user", "content": "another"}], {}, r"must render to the prompt of the row, '.*What is 12"),
        (QUESTION, {"n": 2}, "n must be 1"),
        (QUESTION, {"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ([], {}, "messages is needed"),
        ([{"content": "x"}], {}, "message 0 has no role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "message 0 has a part that is no text"),
        (QUESTION, {"max_tokens": True}, "max_tokens must be a whole number of at least 1"),
        (QUESTION, {"tools": [{"type": "function"}]}, "tools must be a list of declarations"),
        (QUESTION, {"tools": [{"function": {"name": "x", "parameters": None}}]}, "tools must be a list"),
        (QUESTION, {"tools": [{"function": {"name": "x", "parameters": {"properties": None}}}]}, "tools must be a"),
        (QUESTION, {"extra_body": {"stream_options": "x"}}, "stream_options must be an object"),
    ],
)
def test_a_first_request_that_cannot_be_answered_is_refused(
    chatml: Tokenizer, messages: list[Any], more: dict[str, Any], said: str
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=said):
            await asked(client, messages, **more)
        assert (await asked(client, QUESTION)).choices[0].message.content == "fine"

    served(conversation(chatml, Engine(chatml, "fine")), program)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "What?"}, *ANSWERED[1:], MORE], "message 0 is not that of the last request"),
        ([*QUESTION, {"role": "assistant", "content": "It is 409."}, MORE], "message 1 must be the last answer"),
        (ANSWERED, "message 1 must be the last answer as it was given, and another message must follow it"),
        ([*ANSWERED, {"role": "user", "content": "sure?"}], "set rollout.agent.observation_role, or send tool"),
    ],
)
def test_a_program_that_rewrites_what_was_said_is_refused(chatml: Tokenizer, messages: list[Any], said: str) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await asked(client, QUESTION)
        with pytest.raises(openai.BadRequestError, match=said):
            await asked(client, messages)
        assert (await asked(client, [*ANSWERED, MORE])).choices[0].message.content == "then"

    held = conversation(chatml, Engine(chatml, "It is 408.", "then"))
    served(held, program)
    assert [message["content"] for message in held.messages] == ["It is 408.", "no", "then"]


def test_a_conversation_that_is_over_ends_the_loop_whatever_the_program_does(chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await asked(client, QUESTION)
        with pytest.raises(openai.BadRequestError, match="the conversation is over: 1 answers") as refused:
            await asked(client, [*ANSWERED, MORE])
        assert refused.value.code == "context_length_exceeded"
        raise RuntimeError("the program cannot go on")

    held = conversation(chatml, Engine(chatml, "It is 408."), max_answers=1)
    with pytest.raises(ConversationOver, match="1 answers"):
        served(held, program)


def test_a_key_opens_its_own_conversation_and_only_while_it_is_served(chatml: Tokenizer) -> None:
    async def run() -> None:
        server = CompletionServer()
        first, second = (conversation(chatml, Engine(chatml, text)) for text in ("one", "two"))
        async with server.endpoint(first) as one, server.endpoint(second) as two:
            assert one.base_url == two.base_url and one.base_url.startswith("http://127.0.0.1:")
            async with client_of(one) as client, client_of(two) as other:
                assert (await asked(other, QUESTION)).choices[0].message.content == "two"
                assert (await asked(client, QUESTION)).choices[0].message.content == "one"
                assert [model.id async for model in client.models.list()] == ["policy"]
        async with client_of(one) as client:
            with pytest.raises(openai.AuthenticationError, match="no conversation has this API key"):
                await asked(client, QUESTION)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        await server.close()
        async with client_of(one) as client:
            with pytest.raises(openai.APIConnectionError):
                await asked(client, QUESTION)

    asyncio.run(run())
