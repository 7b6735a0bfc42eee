"""OpenAI's chat completions API for conversations, so any program that uses this API can serve as
an agent loop.

One HTTP server on the loopback address serves all conversations of a process; the API key of a
request identifies the conversation. A conversation is stored as tokens. The first request must
render to the prompt of the conversation's row, and later requests may only append messages after
the last answer. Sampled tokens are never re-tokenized from text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridflow.agents.callers import Callers
from hybridflow.agents.completion_answer import next_answer
from hybridflow.agents.completion_request import ChatRequest, RequestError
from hybridflow.agents.conversation import Conversation, ConversationOver, Endpoint
from hybridflow.agents.http_door import Door
from hybridflow.data.chat_template import ShownCall
from hybridflow.errors import DataError

MODEL = "policy"
# a chat template and a tokenizer may drop this many characters: a factor, and a constant
_LONGER = 4
_SLACK = 20_000
_log = logging.getLogger(__name__)


@dataclass
class _Served:
    """A served conversation and the state of its requests."""

    conversation: Conversation
    messages: Sequence[Mapping[str, Any]] = ()  # of the last request
    tools: Sequence[Mapping[str, Any]] = ()  # of the first request
    pending: asyncio.Task[dict[str, Any]] | None = None  # the answer to the last request
    # calls of the last answer, as they were sent to the client
    calls: list[dict[str, Any]] = field(default_factory=list)
    over: ConversationOver | None = None
    # limits memory to one body at a time
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class CompletionServer(Door):
    """Serves all conversations of a process. Agent loops get an endpoint from
    `Conversation.serve`.
    """

    def __init__(self) -> None:
        super().__init__(MODEL, Callers())
        self._served: dict[str, _Served] = {}
        self._has_warned = False

    @asynccontextmanager
    async def endpoint(self, conversation: Conversation) -> AsyncIterator[Endpoint]:
        """Context manager that serves a conversation for the duration of the block.

        Raises:
            ConversationOver: the conversation ended inside the block, regardless of how the client
                handled it.
        """
        await self.open()
        key = secrets.token_urlsafe(32)
        served = _Served(conversation)
        self._served[key] = served
        self.moved()
        try:
            yield Endpoint(self.base_url, key)
        except Exception:
            if served.over is not None:  # the client failed because its request was rejected
                raise served.over from None
            raise
        finally:
            del self._served[key]
            self.callers.forget(key)
            if served.pending is not None:
                served.pending.cancel()
        if served.over is not None:
            raise served.over

    # ---- requests

    def _holder(self, key: str) -> _Served:
        if key not in self._served:
            raise RequestError(
                "this API key belongs to no open conversation; the conversation may have ended", 401
            )
        return self._served[key]

    async def _completion(self, holder: _Served, asked: ChatRequest) -> dict[str, Any]:
        self._warn(asked)
        try:
            return await self._answer_to(holder, asked)
        except ConversationOver as over:
            holder.over = over
            raise

    def _warn(self, asked: ChatRequest) -> None:
        """Warn, once, that the run's configuration overrides these sampling fields."""
        if asked.ignored and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "ignoring %s in a request from the program: the run samples with rollout.sampling "
                "and rollout.val_sampling",
                ", ".join(asked.ignored),
            )

    async def _answer_to(self, served: _Served, asked: ChatRequest) -> dict[str, Any]:
        if served.pending is None or asked.messages != served.messages:
            if served.pending is not None and not served.pending.done():
                raise RequestError("another request in this conversation is still pending")
            self._show(served, asked)
            served.messages = asked.messages
            served.pending = asyncio.create_task(_next_answer(served, asked))
        # a repeated request means that the client lost the answer: send the same one again
        return await asyncio.shield(served.pending)

    @staticmethod
    def _show(served: _Served, asked: ChatRequest) -> None:
        """Append the request's new messages to the conversation."""
        conversation = served.conversation
        messages = asked.messages
        before = len(served.messages)
        if served.pending is None:
            _compare(conversation, messages, asked.tools)
            served.tools = asked.tools
            return
        if served.over is not None:
            raise served.over
        if asked.tools != served.tools:
            raise RequestError(
                "tools cannot change after the first request, because they are already part of the "
                "prompt",
                param="tools",
            )
        for number in range(before):
            if number >= len(messages) or messages[number] != served.messages[number]:
                raise RequestError(
                    f"message {number} differs from the last request; messages can only be appended"
                )
        if len(messages) < before + 2 or not _is_last_answer(messages[before], served):
            raise RequestError(
                f"message {before} must repeat the last answer unchanged, and another message must "
                "follow it"
            )
        _observe(served, messages[before + 1 :])


def _compare(
    conversation: Conversation, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> None:
    """Raise an error if the messages do not render to the row's prompt. A `developer` message may
    replace the system message."""
    shown = conversation.tokenizer.decode(conversation.prompt)
    asked = len(json.dumps(tools))
    for one in messages:
        asked += len(one["content"]) + 1
    # encoding megabytes would block the other conversations
    if asked > _LONGER * len(shown) + _SLACK:
        raise RequestError(
            f"the first request's messages and tools contain {asked} characters, but the row's "
            f"prompt contains {len(shown)}, so they cannot match"
        )
    as_system: list[Mapping[str, Any]] = []
    for one in messages:
        as_system.append({**one, "role": "system"} if one["role"] == "developer" else one)
    problem: DataError | None = None
    ids: list[int] = []
    for some in [messages, *([as_system] if as_system != messages else [])]:
        try:
            ids = conversation.tokenizer.encode_chat(some, tools or None)
        except DataError as error:
            problem = error
            continue
        if ids == list(conversation.prompt):
            return
    if problem is not None and not ids:
        raise problem
    raise RequestError(
        "the messages of the first request must render to the row's prompt: expected "
        f"{shown!r}, got {conversation.tokenizer.decode(ids)!r}"
    )


def _observe(served: _Served, new: Sequence[Mapping[str, Any]]) -> None:
    """Append the messages that follow the policy's last answer: tool results and other messages
    from the program.
    """
    calls = [ShownCall(one["function"]["name"], one["id"]) for one in served.calls]
    names = {one.id: one.name for one in calls}
    shown: list[dict[str, str]] = []
    for one in new:
        if one["role"] == "assistant":
            raise RequestError(
                "an assistant message follows the answer; only the policy may write assistant "
                "messages"
            )
        message = {"role": one["role"], "content": one["content"]}
        if "tool_call_id" in one:
            message["tool_call_id"] = one["tool_call_id"]
        name = one.get("name") or names.get(one.get("tool_call_id", ""))
        if name and one["role"] == "tool":
            message["name"] = name
        shown.append(message)
    for role in {one["role"] for one in shown}:
        served.conversation.tokenizer.template.check(
            role, with_calls=role == "tool" and bool(calls)
        )
    served.conversation.show(shown, calls)


async def _next_answer(served: _Served, asked: ChatRequest) -> dict[str, Any]:
    """Sample the policy's next answer and return it as a chat completion."""
    conversation = served.conversation
    completion = await next_answer(conversation, asked, MODEL, conversation.call_id)
    [choice] = completion["choices"]
    served.calls = choice["message"].get("tool_calls", [])
    return completion


def _is_last_answer(message: Mapping[str, Any], served: _Served) -> bool:
    given = served.conversation.messages[-1]["content"]
    calls = [one.get("id") for one in message.get("tool_calls") or ()]
    same_calls = calls == [one["id"] for one in served.calls]
    told = message["content"] == given or (not message["content"] and bool(served.calls))
    return message["role"] == "assistant" and told and same_calls
