"""Conversations, and models, behind OpenAI's interface, asked by the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from hybridflow.agents.completions import CompletionServer
from hybridflow.agents.conversation import Conversation, ConversationOver, Endpoint, Sampled
from hybridflow.agents.model_server import ModelServer
from hybridflow.config.schema import SamplingConfig
from hybridflow.data.tokenizer import Tokenizer
from tests.unit.agents.talks import FAMILIES, Engine, byte_tokenizer, conversation

QUESTION: list[Any] = [{"role": "user", "content": "What is 12 * 34?"}]
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
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
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=120.0, max_retries=0
    )


def through_conversation(held: Conversation, program: Program) -> Any:
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


def through_model(held: Conversation, program: Program) -> Any:
    """What a program returns that talks to a model with the conversation's engine."""

    async def sample(tokens: Sequence[int], most: int, sampling: SamplingConfig) -> Sampled:
        assert sampling == SamplingConfig()
        return await held.sample(tokens, most)

    async def run() -> Any:
        server = ModelServer(
            held.tokenizer,
            sample,
            model="policy",
            key="the key",
            context=len(held.prompt) + held.room,
            defaults=SamplingConfig(),
            call_format="hermes",
        )
        await server.open()
        try:
            async with client_of(Endpoint(server.base_url, "the key")) as client:
                return await program(client)
        finally:
            await server.close()

    return asyncio.run(run())


Served = Callable[[Conversation, Program], Any]


@pytest.fixture(params=[through_conversation, through_model])
def served(request: pytest.FixtureRequest) -> Served:
    """Both servers, for what they have in common."""
    found: Served = request.param
    return found


async def asked(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def with_a_tool(client: openai.AsyncOpenAI) -> str:
    """An agent as one finds it in the manuals: ask, run the tools that are called, show the
    results, ask again."""
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


@pytest.mark.slow
def test_a_program_with_a_tool_is_answered(served: Served, tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, CALL, "It is 408.")
    assert served(conversation(tokenizer, engine), with_a_tool) == "It is 408."
    assert "408" in tokenizer.decode(engine.asked[1][0])


@pytest.mark.slow
def test_a_program_with_a_tool_leaves_the_tokens_that_the_engine_saw(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, CALL, "It is 408.")
    held = conversation(tokenizer, engine)
    assert through_conversation(held, with_a_tool) == "It is 408."
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


def test_a_streamed_answer_is_the_same_in_pieces(served: Served, chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> tuple[str, list[Any], str, int]:
        text = ""
        calls = []
        reason = ""
        tokens = 0
        options = {"include_usage": True}
        async for chunk in await asked(
            client, QUESTION, tools=TOOLS, stream=True, stream_options=options
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reason = choice.finish_reason or reason
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, calls, reason, tokens

    held = conversation(chatml, Engine(chatml, CALL))
    text, [call], reason, tokens = served(held, program)
    assert (text, reason, tokens) == (CALL, "tool_calls", len(chatml.encode(CALL)) + 1)
    assert json.loads(call.function.arguments) == {"a": 12, "b": 34}


def test_an_answer_is_as_long_as_the_program_asks_and_its_end_is_told(
    served: Served, chatml: Tokenizer
) -> None:
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
    assert through_conversation(held, program) == ["only once"] * 3
    assert held.answered == 1


def test_what_changes_no_answer_is_taken(
    chatml: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that clients send by themselves; the run's own sampling is said to stay."""
    sent: dict[str, Any] = {
        "n": 1,
        "stream": False,
        "logprobs": False,
        "frequency_penalty": 0,
        "logit_bias": {},
    }
    sent |= {
        "response_format": {"type": "text"},
        "user": "me",
        "store": False,
        "tool_choice": "auto",
        "seed": 3,
    }

    async def program(client: openai.AsyncOpenAI) -> Any:
        return await asked(
            client, QUESTION, temperature=0.2, top_p=0.9, metadata={"a": "b"}, **sent
        )

    found = through_conversation(conversation(chatml, Engine(chatml, "fine")), program)
    assert found.choices[0].message.content == "fine" and found.ignored == [
        "temperature",
        "top_p",
        "seed",
    ]
    assert "ignoring temperature, top_p, seed" in caplog.text


@pytest.mark.slow
def test_an_answer_ends_before_a_text_of_stop(tokenizer: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> Any:
        first = await asked(client, QUESTION, stop=["\nObservation:", "END"], logprobs=True)
        message = {"role": "assistant", "content": first.choices[0].message.content}
        await asked(client, [*QUESTION, message, {"role": "user", "content": "Observation: 408"}])
        return first

    engine = Engine(tokenizer, "I call.\nObservation: END 9", "It is 408.")
    held = conversation(tokenizer, engine)
    first = through_conversation(held, program)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("I call.", "stop")
    kept = tokenizer.encode("I call.\nObservation:")
    assert held.tokens[: len(kept)] == kept and held.mask[: len(kept) + 1] == [True] * len(kept) + [
        False
    ]
    told = first.choices[0].logprobs.content
    assert [one.logprob for one in told] == held.log_probs[
        : len(kept)
    ] and first.usage.completion_tokens == len(kept)
    assert "".join(one.token for one in told) == "I call.\nObservation:"


def test_results_and_questions_follow_an_answer_together(chatml: Tokenizer) -> None:
    """Messages of several roles after one answer are what the template writes of them."""

    async def program(client: openai.AsyncOpenAI) -> None:
        message = (await asked(client, QUESTION, tools=TOOLS)).choices[0].message
        [call] = message.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "text", "text": "408 \U0001f600"}],
        }
        more = [message.model_dump(exclude_none=True), result, {"role": "user", "content": "Sure?"}]
        await asked(client, [*QUESTION, *more], tools=TOOLS)

    held = conversation(chatml, Engine(chatml, CALL, "Yes."))
    through_conversation(held, program)
    shown = chatml.render_chat([*QUESTION, *held.messages[:-1]])
    assert shown.endswith(
        "<tool_response>\n408 "
        "\U0001f600\n</tool_response><|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    whole = [*held.prompt, *held.tokens]
    assert whole == [*chatml.encode(shown), *chatml.encode("Yes."), chatml.eos_id]


@pytest.mark.slow
def test_calls_are_told_as_the_request_wants_them(served: Served, chatml: Tokenizer) -> None:
    async def calls_of(**more: Any) -> Any:
        async def program(client: openai.AsyncOpenAI) -> Any:
            return (await asked(client, QUESTION, tools=TOOLS, **more)).choices[0]

        return await asyncio.to_thread(
            served, conversation(chatml, Engine(chatml, CALL + CALL)), program
        )

    both, first, none = (
        asyncio.run(calls_of(**more))
        for more in ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"})
    )
    ids = [one.id for one in both.message.tool_calls]
    assert len(set(ids)) == 2 and all(len(one) == 9 for one in ids)
    assert served is through_model or ids == ["c00010000", "c00010001"]
    assert len(first.message.tool_calls) == 1 and first.finish_reason == "tool_calls"
    assert (
        none.message.tool_calls is None
        and none.message.content == CALL + CALL
        and none.finish_reason == "stop"
    )


def test_tools_stay_those_of_the_prompt(chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await asked(client, QUESTION, tools=TOOLS)
        with pytest.raises(
            openai.BadRequestError, match="tools cannot change after the first request"
        ):
            await asked(client, [*ANSWERED, MORE])

    through_conversation(conversation(chatml, Engine(chatml, "It is 408.")), program)


def test_a_developer_speaks_as_the_system(served: Served, tmp_path: Path) -> None:
    known, end, template = FAMILIES["chatml"]
    refusing = (
        "{% for m in messages if m.role == 'developer' %}{{ raise_exception('no developer') }}{% "
        "endfor %}"
    )
    chatml = byte_tokenizer(tmp_path, known, end, refusing + template)
    told = [{"role": "system", "content": "Be brief."}, *QUESTION]
    held = conversation(chatml, Engine(chatml, "fine"))
    held.prompt = chatml.encode_chat(told)

    async def program(client: openai.AsyncOpenAI) -> Any:
        return await asked(client, [{"role": "developer", "content": "Be brief."}, *QUESTION])

    assert served(held, program).choices[0].message.content == "fine"


def test_other_paths_are_refused_in_openais_form(served: Served, chatml: Tokenizer) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings is not served"):
            await client.embeddings.create(model="policy", input="x")

    served(conversation(chatml, Engine(chatml)), program)


ANSWERED: list[Any] = [*QUESTION, {"role": "assistant", "content": "It is 408."}]
MORE: dict[str, Any] = {"role": "tool", "tool_call_id": "x", "content": "no"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        (QUESTION, {"n": 2}, "n must be 1"),
        (QUESTION, {"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ([], {}, "messages is required"),
        ([{"content": "x"}], {}, "message 0 has no role"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            "message 0: content parts must be text",
        ),
        (QUESTION, {"max_tokens": True}, "max_tokens must be a whole number of at least 1"),
        (
            QUESTION,
            {"tools": [{"type": "function"}]},
            "tools must be a list of function declarations",
        ),
        (
            QUESTION,
            {"tools": [{"function": {"name": "x", "parameters": None}}]},
            "tools must be a list",
        ),
        (
            QUESTION,
            {"tools": [{"function": {"name": "x", "parameters": {"properties": None}}}]},
            "tools must be a",
        ),
        (QUESTION, {"extra_body": {"stream_options": "x"}}, "stream_options must be an object"),
        (
            QUESTION,
            {"extra_body": {"stream_options": {"x": 1}}},
            "stream_options must be an object",
        ),
        (QUESTION, {"logprobs": True, "top_logprobs": 3}, "top_logprobs must be 0"),
        (
            QUESTION,
            {"response_format": {"type": "json_object"}},
            "response_format must be .*a grammar would change",
        ),
        (QUESTION, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice must be auto or none"),
        (
            QUESTION,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice must",
        ),
        (
            QUESTION,
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "chat_template_kwargs must be",
        ),
        (QUESTION, {"logit_bias": {"5": 1}}, "logit_bias must be empty"),
        (QUESTION, {"reasoning_effort": "high"}, "reasoning_effort is not supported; remove it"),
        (QUESTION, {"extra_body": {"ignore_eos": True}}, "ignore_eos is not supported"),
        (
            QUESTION,
            {"stop": ["a", "b", "c", "d", "e"]},
            "stop must be a string or a list of at most 4",
        ),
        (
            QUESTION,
            {"extra_body": {"functions": [{"name": "x"}]}},
            "functions was replaced by tools",
        ),
    ],
)
def test_a_first_request_that_cannot_be_answered_is_refused(
    served: Served, chatml: Tokenizer, messages: list[Any], more: dict[str, Any], said: str
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await asked(client, messages, **more)
        assert refused.value.type == "invalid_request_error" and (
            not more or refused.value.param in said
        )
        assert (await asked(client, QUESTION)).choices[0].message.content == "fine"

    served(conversation(chatml, Engine(chatml, "fine")), program)


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        (
            [{"role": "user", "content": "another"}],
            {},
            r"must render to the row's prompt: expected '.*What is 12",
        ),
        (QUESTION, {"presence_penalty": 0.5}, "presence_penalty must be 0"),
    ],
)
def test_a_first_request_that_would_change_the_run_is_refused(
    chatml: Tokenizer, messages: list[Any], more: dict[str, Any], said: str
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=said):
            await asked(client, messages, **more)

    through_conversation(conversation(chatml, Engine(chatml)), program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [{"role": "user", "content": "What?"}, *ANSWERED[1:], MORE],
            "message 0 differs from the last request",
        ),
        (
            [*QUESTION, {"role": "assistant", "content": "It is 409."}, MORE],
            "message 1 must repeat the last answer",
        ),
        (
            ANSWERED,
            "message 1 must repeat the last answer unchanged, and another message must follow it",
        ),
        (
            [*ANSWERED, {"role": "assistant", "content": "sure."}],
            "an assistant message follows the answer",
        ),
    ],
)
def test_a_program_that_rewrites_what_was_said_is_refused(
    chatml: Tokenizer, messages: list[Any], said: str
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await asked(client, QUESTION)
        with pytest.raises(openai.BadRequestError, match=said):
            await asked(client, messages)
        assert (await asked(client, [*ANSWERED, MORE])).choices[0].message.content == "then"

    held = conversation(chatml, Engine(chatml, "It is 408.", "then"))
    through_conversation(held, program)
    assert [message["content"] for message in held.messages] == ["It is 408.", "no", "then"]


def test_a_conversation_that_is_over_ends_the_loop_whatever_the_program_does(
    chatml: Tokenizer,
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await asked(client, QUESTION)
        with pytest.raises(
            openai.BadRequestError,
            match=r"the conversation has ended: it reached rollout\.agent\.max_answers=1",
        ) as refused:
            await asked(client, [*ANSWERED, MORE])
        assert refused.value.code == "context_length_exceeded"
        raise RuntimeError("the program cannot go on")

    held = conversation(chatml, Engine(chatml, "It is 408."), max_answers=1)
    with pytest.raises(ConversationOver, match="max_answers=1"):
        through_conversation(held, program)


@pytest.mark.slow
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
            with pytest.raises(
                openai.AuthenticationError, match="this API key belongs to no open conversation"
            ):
                await asked(client, QUESTION)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        await server.close()
        async with client_of(one) as client:
            with pytest.raises(openai.APIConnectionError):
                await asked(client, QUESTION)

    asyncio.run(run())
