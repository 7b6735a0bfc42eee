"""OpenAI's chat completions over conversations: a program that knows only that interface becomes an agent loop.

One HTTP server on the loopback address answers for all conversations of a process; the API key of a request says which
one it belongs to. A conversation stays tokens: the first request must render to the prompt of its row, and of every
later one only what follows the last answer is taken. Nothing that was sampled is made again from text.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridflow.agents.conversation import Conversation, ConversationOver, Endpoint
from hybridflow.agents.formats.base import FORMATS, Call
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from aiohttp import web

MODEL = "policy"
_MOST_BYTES = 16 << 20  # of a request
_QUIET_S = 0.02  # from one request or answer to the next, while a program is at work on it


class RequestError(Exception):
    """What is wrong with a request, told to the client with an HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Served:
    """A conversation with the requests it has had."""

    conversation: Conversation
    messages: list[Mapping[str, Any]] = field(default_factory=list)  # those of the last request
    pending: asyncio.Task[dict[str, Any]] | None = None  # the answer to it
    calls: list[dict[str, Any]] = field(default_factory=list)  # in the last answer, as the client was told them
    over: ConversationOver | None = None


class CompletionServer:
    """Answers requests in the event loop that starts it; `Conversation.serve` is how an agent loop gets an endpoint."""

    def __init__(self) -> None:
        self._served: dict[str, _Served] = {}
        self._runner: web.AppRunner | None = None
        self._base_url = ""
        self._starting = asyncio.Lock()
        self._moved = 0.0

    @property
    def is_active(self) -> bool:
        """Whether programs are at work: a request came or an answer went a moment ago."""
        return time.monotonic() - self._moved < _QUIET_S

    @asynccontextmanager
    async def endpoint(self, conversation: Conversation) -> AsyncIterator[Endpoint]:
        """Answer for a conversation inside of the block.

        Raises:
            ConversationOver: the conversation came to its end inside of the block, whatever the client made of that.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        key, served = secrets.token_urlsafe(32), _Served(conversation)
        self._served[key] = served
        self._moved = time.monotonic()
        try:
            yield Endpoint(self._base_url, key)
        except Exception:
            if served.over is not None:  # the client was refused and failed of that
                raise served.over from None
            raise
        finally:
            del self._served[key]
            if served.pending is not None:
                served.pending.cancel()
        if served.over is not None:
            raise served.over

    async def close(self) -> None:
        """End the server and its connections."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes([web.post("/v1/chat/completions", self._complete), web.get("/v1/models", self._models)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runner, self._base_url = runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    # ---- requests

    def _of(self, request: web.Request) -> _Served:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._served:
            raise RequestError("no conversation has this API key; it may be over", 401)
        return self._served[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._of(request)
        except RequestError as error:
            return _error(error)
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "hybridflow"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._moved = time.monotonic()
        try:
            served = self._of(request)
            body = await _body_of(request)
            completion = await self._answer_to(served, body)
            self._moved = time.monotonic()
        except (RequestError, DataError) as error:  # DataError: of the chat template
            return _error(error)
        except ConversationOver as over:
            served.over = over
            return _error(RequestError(f"the conversation is over: {over}"), "context_length_exceeded")
        return await _streamed(request, completion, body) if body.get("stream") else _json(completion)

    async def _answer_to(self, served: _Served, body: Any) -> dict[str, Any]:
        messages = _messages_of(body)
        if served.pending is None or messages != served.messages:
            if served.pending is not None and not served.pending.done():
                raise RequestError("another request of this conversation has no answer yet")
            self._show(served, messages, body)
            served.messages = messages
            served.pending = asyncio.create_task(_next_answer(served, body))
        # a client that sends the same request again has lost the answer, and is given that one
        return await asyncio.shield(served.pending)

    @staticmethod
    def _show(served: _Served, messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> None:
        """Append to the conversation what the request adds to it."""
        conversation, before = served.conversation, len(served.messages)
        if served.pending is None:
            ids = conversation.tokenizer.encode_chat(messages, body.get("tools") or None)
            if ids != list(conversation.prompt):
                raise RequestError(
                    "the messages of the first request must render to the prompt of the row, "
                    f"{conversation.tokenizer.decode(conversation.prompt)!r}; they render to "
                    f"{conversation.tokenizer.decode(ids)!r}"
                )
            return
        if served.over is not None:
            raise served.over
        differs = next((n for n in range(before) if n >= len(messages) or messages[n] != served.messages[n]), None)
        if differs is not None:
            raise RequestError(f"message {differs} is not that of the last request; a conversation only goes on")
        if len(messages) < before + 2 or not _is_last_answer(messages[before], served):
            raise RequestError(
                f"message {before} must be the last answer as it was given, and another message must follow it"
            )
        role = conversation.config.observation_role
        new = messages[before + 1 :]
        if other := next((str(one["role"]) for one in new if one["role"] != role), None):
            raise RequestError(
                f"a message of role {other} follows the answer, and the run shows messages of role {role}; set "
                f"rollout.agent.observation_role, or send {role}"
            )
        conversation.observe([one["content"] for one in new])


async def _next_answer(served: _Served, body: Mapping[str, Any]) -> dict[str, Any]:
    """The next answer of the policy as a completion."""
    conversation = served.conversation
    before = len(conversation.prompt) + len(conversation.tokens)
    text = await conversation.answer(body.get("max_completion_tokens") or body.get("max_tokens"))
    served.calls = _tool_calls(conversation.config.call_format, text, body.get("tools") or ())
    conversation.calls += len(served.calls)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason = conversation.finish_reason
    if served.calls:
        message, reason = {**message, "tool_calls": served.calls}, "tool_calls"
    after = len(conversation.prompt) + len(conversation.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": before, "completion_tokens": after - before, "total_tokens": after},
    }


def _tool_calls(call_format: str, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The calls that the text has, as OpenAI's clients read them; none where one of them cannot be read."""
    known = {
        str(one["function"]["name"]): tuple(one["function"].get("parameters", {}).get("properties", {}))
        for one in tools
    }
    found: list[Call] = FORMATS.get(call_format)(text, known) if known else []
    if any(call.problem for call in found):
        return []
    return [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in found
    ]


def _is_last_answer(message: Mapping[str, Any], served: _Served) -> bool:
    given = served.conversation.messages[-1]["content"]
    same_calls = [one.get("id") for one in message.get("tool_calls") or ()] == [one["id"] for one in served.calls]
    told = message["content"] == given or (not message["content"] and bool(served.calls))
    return message["role"] == "assistant" and told and same_calls


async def _body_of(request: web.Request) -> Any:
    from aiohttp import web

    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(f"the body has more than {_MOST_BYTES >> 20} MiB", 413) from error


def _messages_of(body: Any) -> list[Mapping[str, Any]]:
    """The messages of a request, each with a role and its content as text.

    Raises:
        RequestError: the body is not a request that can be answered.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestError("messages is needed, a list of messages")
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1: a conversation has one answer at a time")
    for name in ("max_tokens", "max_completion_tokens"):
        most = body.get(name)
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise RequestError(f"{name} must be a whole number of at least 1")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(one, dict) and _declares(one.get("function")) for one in tools
    ):
        raise RequestError("tools must be a list of declarations of functions")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestError("stream_options must be an object")
    return [_message(number, one) for number, one in enumerate(body["messages"])]


def _declares(function: Any) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters", {})
    return isinstance(parameters, dict) and isinstance(parameters.get("properties", {}), dict)


def _message(number: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {number} has no role")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RequestError(f"message {number} has a part that is no text")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"the content of message {number} is no text")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise RequestError(f"the tool_calls of message {number} are no list of calls")
    found = {"role": message["role"], "content": content or ""}
    return {**found, "tool_calls": calls} if calls else found


# ---- responses


def _json(value: Any) -> web.Response:
    from aiohttp import web

    return web.json_response(value)


def _error(error: Exception, code: str | None = None) -> web.Response:
    from aiohttp import web

    status = error.status if isinstance(error, RequestError) else 400
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return web.json_response({"error": {"message": str(error), "type": kind, "code": code}}, status=status)


async def _streamed(request: web.Request, completion: Mapping[str, Any], body: Mapping[str, Any]) -> web.StreamResponse:
    """The completion as server-sent events: the message in one piece, then why it ended."""
    from aiohttp import web

    [choice] = completion["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": number, **one} for number, one in enumerate(message["tool_calls"])]
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
