"""OpenAI's chat completions API for conversations, so any program that uses this API can serve as
an agent loop.

One HTTP server on the loopback address serves all conversations of a process; the API key of a
request identifies the conversation. A conversation is stored as tokens: the first request must
render to the prompt of its row, and later requests only append what follows the last answer.
Sampled tokens are never re-tokenized from text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.agents.call_reading import read_calls, while_others_go_on
from hybridflow.agents.callers import Callers
from hybridflow.agents.completion_request import ChatRequest, RequestError, read_request
from hybridflow.agents.conversation import Conversation, ConversationOver, Endpoint
from hybridflow.data.chat_template import ShownCall
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from aiohttp import web

MODEL = "policy"
_MOST_BYTES = 16 << 20  # per request
_MOST_CONTAINERS = 100_000
# a chat template and a tokenizer may drop this many characters: a factor, and a constant
_LONGER = 4
_SLACK = 20_000
_log = logging.getLogger(__name__)
_BODY_S = 60.0  # deadline for the body of a request
_IDLE_S = 60.0  # deadline for the head of a request, including the next one on the same connection
_QUIET_S = 0.02  # a program counts as active for this long after a request or an answer


@dataclass
class _Served:
    """A conversation and the state of its requests."""

    conversation: Conversation
    messages: Sequence[Mapping[str, Any]] = ()  # of the last request
    tools: Sequence[Mapping[str, Any]] = ()  # of the first request
    pending: asyncio.Task[dict[str, Any]] | None = None  # the answer to the last request
    # calls of the last answer, as they were sent to the client
    calls: list[dict[str, Any]] = field(default_factory=list)
    over: ConversationOver | None = None
    # limits memory to one body at a time
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class CompletionServer:
    """An HTTP server that runs in the event loop in which it is started. Agent loops get an
    endpoint from `Conversation.serve`."""

    def __init__(self) -> None:
        self._served: dict[str, _Served] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._callers = Callers()
        self._base_url = ""
        self._starting = asyncio.Lock()
        self._moved = 0.0
        self._has_warned = False

    @property
    def is_active(self) -> bool:
        """True if a request arrived or an answer was sent very recently."""
        return time.monotonic() - self._moved < _QUIET_S

    @asynccontextmanager
    async def endpoint(self, conversation: Conversation) -> AsyncIterator[Endpoint]:
        """Context manager that serves a conversation for the duration of the block.

        Raises:
            ConversationOver: the conversation ended inside the block, regardless of how the client
                handled it.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        key = secrets.token_urlsafe(32)
        served = _Served(conversation)
        self._served[key] = served
        self._moved = time.monotonic()
        try:
            yield Endpoint(self._base_url, key)
        except Exception:
            if served.over is not None:  # the client failed because its request was rejected
                raise served.over from None
            raise
        finally:
            del self._served[key]
            self._callers.forget(key)
            if served.pending is not None:
                served.pending.cancel()
        if served.over is not None:
            raise served.over

    async def close(self) -> None:
        """Stop the server and close its connections."""
        if self._runner is not None and self._listener is not None:
            runner = self._runner
            self._runner = None
            self._listener.close()
            await runner.cleanup()

    async def _start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete, expect_handler=_send_continue),
                web.get("/v1/models", self._models),
                web.get(f"/v1/models/{MODEL}", self._models),
                web.route("*", "/{rest:.*}", _unknown),
            ]
        )
        http = logging.getLogger(f"{__name__}.http")
        http.addFilter(_is_ours)
        runner = web.AppRunner(
            app, access_log=None, logger=http, shutdown_timeout=1.0, keepalive_timeout=_IDLE_S
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        self._listener = await self._callers.listen("127.0.0.1", server)
        port = self._listener.sockets[0].getsockname()[1]
        self._base_url = f"http://127.0.0.1:{port}/v1"
        self._runner = runner

    # ---- requests

    def _of(self, request: web.Request) -> _Served:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._served:
            raise RequestError("no conversation has this API key; it may have ended", 401)
        self._callers.know(request.transport, key)
        return self._served[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._of(request)
        except RequestError as error:
            return _error(error)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridflow"}
        return _json(model if request.path.endswith(MODEL) else {"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._moved = time.monotonic()
        try:
            served = self._of(request)
            async with served.reading:
                asked = read_request(await _body_of(request))
            self._warn(asked)
            completion = await self._answer_to(served, asked)
            self._moved = time.monotonic()
        except (RequestError, DataError) as error:  # DataError is raised by the chat template
            return _error(error)
        except ConversationOver as over:
            served.over = over
            return _error(
                RequestError(f"the conversation is over: {over}"), "context_length_exceeded"
            )
        return await _streamed(request, completion, asked) if asked.stream else _json(completion)

    def _warn(self, asked: ChatRequest) -> None:
        """Log a single warning that the run's configuration overrides these sampling fields."""
        if asked.ignored and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a program's request sets %s, which is ignored: the run samples with "
                "rollout.sampling and rollout.val_sampling",
                ", ".join(asked.ignored),
            )

    async def _answer_to(self, served: _Served, asked: ChatRequest) -> dict[str, Any]:
        if served.pending is None or asked.messages != served.messages:
            if served.pending is not None and not served.pending.done():
                raise RequestError("another request of this conversation is still pending")
            self._show(served, asked)
            served.messages = asked.messages
            served.pending = asyncio.create_task(_next_answer(served, asked))
        # a repeated request means that the client lost the answer: send the same one again
        return await asyncio.shield(served.pending)

    @staticmethod
    def _show(served: _Served, asked: ChatRequest) -> None:
        """Append the new messages of the request to the conversation."""
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
                "tools must be the same as in the first request: the prompt contains them",
                param="tools",
            )
        differs = next(
            (n for n in range(before) if n >= len(messages) or messages[n] != served.messages[n]),
            None,
        )
        if differs is not None:
            raise RequestError(
                f"message {differs} differs from the last request; messages can only be appended"
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
    asked = sum(len(one["content"]) + 1 for one in messages) + len(json.dumps(tools))
    # encoding megabytes would block the other conversations
    if asked > _LONGER * len(shown) + _SLACK:
        raise RequestError(
            f"the first request's messages and tools have {asked} characters, but the row's prompt "
            f"has {len(shown)}, so the two cannot match"
        )
    as_system = [
        {**one, "role": "system"} if one["role"] == "developer" else one for one in messages
    ]
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
    """Show the messages that follow the last answer: results of its calls, and other messages from
    the program."""
    calls = [ShownCall(one["function"]["name"], one["id"]) for one in served.calls]
    names = {one.id: one.name for one in calls}
    shown: list[dict[str, str]] = []
    for one in new:
        if one["role"] == "assistant":
            raise RequestError(
                "an assistant message follows the answer; only the policy may answer"
            )
        known = {"tool_call_id": one["tool_call_id"]} if "tool_call_id" in one else {}
        name = one.get("name") or names.get(one.get("tool_call_id", ""))
        named = {"name": name} if name and one["role"] == "tool" else {}
        shown.append({"role": one["role"], "content": one["content"], **known, **named})
    for role in {one["role"] for one in shown}:
        served.conversation.tokenizer.template.check(
            role, with_calls=role == "tool" and bool(calls)
        )
    served.conversation.show(shown, calls)


async def _next_answer(served: _Served, asked: ChatRequest) -> dict[str, Any]:
    """Sample the policy's next answer and return it in the format of a completion."""
    conversation = served.conversation
    before = len(conversation.prompt) + len(conversation.tokens)
    text = await conversation.answer(asked.most, asked.stop)
    served.calls = await while_others_go_on(
        lambda said: _tool_calls(conversation, said, asked), text
    )
    conversation.calls += len(served.calls)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason = conversation.finish_reason
    if served.calls:
        message = {**message, "tool_calls": served.calls}
        reason = "tool_calls"
    after = len(conversation.prompt) + len(conversation.tokens)
    sampled = after - before
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    if asked.logprobs:
        choice["logprobs"] = {"content": _log_probs(conversation, sampled), "refusal": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": after},
        **({"ignored": list(asked.ignored)} if asked.ignored else {}),
    }


def _log_probs(conversation: Conversation, sampled: int) -> list[dict[str, Any]]:
    """Return the last `sampled` tokens and their log-probabilities, without the stop token."""
    ids = conversation.tokens[-sampled:]
    log_probs = conversation.log_probs[-sampled:]
    if ids and ids[-1] in conversation.tokenizer.stop_ids:
        ids = ids[:-1]
        log_probs = log_probs[:-1]
    texts = [conversation.tokenizer.decode([token]) for token in ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, log_probs, strict=True)
    ]


def _tool_calls(conversation: Conversation, text: str, asked: ChatRequest) -> list[dict[str, Any]]:
    """Return the calls in the text, in OpenAI's format. Returns an empty list if any call cannot be
    parsed."""
    tools = {
        str(one["function"]["name"]): one["function"].get("parameters", {}) for one in asked.tools
    }
    if not tools or not asked.reads_calls:
        return []
    opened = conversation.tokenizer.template.opens_thinking
    found = read_calls(conversation.config.call_format, text, tools, thinking_open=opened)
    if any(call.problem for call in found):
        return []
    return [
        {
            "id": call.id or conversation.call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(found[: asked.most_calls])
    ]


def _is_last_answer(message: Mapping[str, Any], served: _Served) -> bool:
    given = served.conversation.messages[-1]["content"]
    same_calls = [one.get("id") for one in message.get("tool_calls") or ()] == [
        one["id"] for one in served.calls
    ]
    told = message["content"] == given or (not message["content"] and bool(served.calls))
    return message["role"] == "assistant" and told and same_calls


def _containers(text: str) -> int:
    """Count the lists and objects in a JSON text. Returns 0 if the text has too few brackets to
    exceed the limit."""
    if text.count("[") + text.count("{") <= _MOST_CONTAINERS:
        return 0
    data = text.encode("utf-8", "surrogatepass").replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    bytes_ = np.frombuffer(data, np.uint8)
    is_outside = np.cumsum(bytes_ == ord('"'), dtype=np.int32) % 2 == 0  # outside strings
    return int(np.count_nonzero(is_outside & ((bytes_ == ord("[")) | (bytes_ == ord("{")))))


async def _send_continue(request: web.Request) -> None:
    """Respond to `Expect: 100-continue`. aiohttp's own handler fails if the client has
    disconnected."""
    with suppress(OSError):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _is_ours(record: logging.LogRecord) -> bool:
    """Log filter that drops records about malformed requests and lost connections, because
    unauthenticated clients could flood the log with them."""
    from aiohttp.http_exceptions import HttpProcessingError

    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, OSError)))


async def _unknown(request: web.Request) -> web.StreamResponse:
    return _error(
        RequestError(f"{request.path} is not served; use /v1/chat/completions or /v1/models", 404)
    )


async def _body_of(request: web.Request) -> Any:
    from aiohttp import web

    try:
        async with asyncio.timeout(_BODY_S):
            text = await request.text()
        # parsing takes seconds, and blocks all other conversations
        if (made := _containers(text)) > _MOST_CONTAINERS:
            raise RequestError(
                f"the body has {made} lists and objects; the limit is {_MOST_CONTAINERS}"
            )
        return json.loads(text)
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {_BODY_S:.0f} s", 408) from error
    except OSError as error:
        raise RequestError(f"the connection was lost before the body arrived: {error}") from error
    except (ValueError, LookupError, RecursionError) as error:  # LookupError: unknown encoding
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(f"the body exceeds {_MOST_BYTES >> 20} MiB", 413) from error


# ---- responses


def _json(value: Any) -> web.Response:
    from aiohttp import web

    return web.json_response(value)


def _error(error: Exception, code: str | None = None) -> web.Response:
    from aiohttp import web

    status = error.status if isinstance(error, RequestError) else 400
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    param = error.param if isinstance(error, RequestError) else None
    told = {"message": str(error), "type": kind, "param": param, "code": code}
    return web.json_response({"error": told}, status=status)


async def _streamed(
    request: web.Request, completion: Mapping[str, Any], asked: ChatRequest
) -> web.StreamResponse:
    """Send the completion as server-sent events: the message in one event, then the finish
    reason."""
    from aiohttp import web

    [choice] = completion["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [
            {"index": number, **one} for number, one in enumerate(message["tool_calls"])
        ]
    head = {name: completion[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    chunks: list[dict[str, Any]] = [
        {
            **head,
            "choices": [
                {
                    "index": 0,
                    "delta": message,
                    "finish_reason": None,
                    "logprobs": choice["logprobs"],
                }
            ],
        },
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if asked.with_usage:
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
