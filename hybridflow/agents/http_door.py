"""The HTTP layer of OpenAI's chat completions API: connections, keys, body limits, errors and
events. `completions` uses this layer to serve the conversations of agent loops, and `model_server`
to serve a model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hybridflow.agents.callers import Callers
from hybridflow.agents.completion_request import ChatRequest, RequestError, read_request
from hybridflow.agents.conversation import ConversationOver
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from aiohttp import web

LOOPBACK = "127.0.0.1"
_MOST_BYTES = 16 << 20  # per request
_MOST_CONTAINERS = 100_000
_BODY_S = 60.0  # deadline for the body of a request
_IDLE_S = 60.0  # deadline for the head of a request, including the next one on the same connection
_QUIET_S = 0.02  # a program counts as active for this long after a request or an answer
_SERVER_ERROR = 500


class Holder(Protocol):
    """The server's state for one API key."""

    @property
    def reading(self) -> asyncio.Lock | asyncio.Semaphore:
        """Lock to acquire while reading a request's body. Limits the number of bodies in memory."""


class Door(ABC):
    """An HTTP server that runs in the event loop that called `open`.

    Attributes:
        model: name of the model, the only one listed by `/v1/models`.
        callers: the connections.
        base_url: the address for clients, once it is open.
    """

    # answer a client that hangs up, so that it can ask again
    _ends_with_connection = False

    def __init__(self, model: str, callers: Callers) -> None:
        self.model = model
        self.callers = callers
        self.base_url = ""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._moved = 0.0

    @abstractmethod
    def _holder(self, key: str) -> Holder:
        """Return the state associated with a key. Raises RequestError if the key is unknown."""

    @abstractmethod
    async def _completion(self, holder: Any, asked: ChatRequest) -> dict[str, Any]:
        """Answer a request that was sent with the key of `holder`.

        Raises:
            RequestError, DataError: the request cannot be answered.
            ConversationOver: there is no room for an answer.
        """

    def _read(self, body: Any) -> ChatRequest:
        """Parse the JSON body of a chat completion request."""
        return read_request(body)

    @property
    def is_active(self) -> bool:
        """True if a request was received or an answer was sent very recently."""
        return time.monotonic() - self._moved < _QUIET_S

    def moved(self) -> None:
        """Note activity."""
        self._moved = time.monotonic()

    # ---- the server

    async def open(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Start listening, unless the server is already open. Port 0 selects a free port.

        Raises:
            OSError: the address cannot be used.
        """
        async with self._opening:
            if self._runner is None:
                await self._start(host, port)

    async def close(self) -> None:
        """Stop the server and close its connections."""
        if self._runner is not None and self._listener is not None:
            runner = self._runner
            self._runner = None
            self._listener.close()
            await runner.cleanup()

    async def _start(self, host: str, port: int) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete, expect_handler=_send_continue),
                web.get("/v1/models", self._models),
                web.get(f"/v1/models/{self.model}", self._models),
                web.route("*", "/{rest:.*}", _unknown),
            ]
        )
        http = logging.getLogger(f"{__name__}.http")
        http.addFilter(_is_ours)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=http,
            shutdown_timeout=1.0,
            keepalive_timeout=_IDLE_S,
            handler_cancellation=self._ends_with_connection,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        try:
            self._listener = await self.callers.listen(host, server, port)
        except OSError:
            await runner.cleanup()
            raise
        port = self._listener.sockets[0].getsockname()[1]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._runner = runner

    # ---- requests

    def _of(self, request: web.Request) -> Holder:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        found = self._holder(key)
        self.callers.know(request.transport, key)
        return found

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._of(request)
        except RequestError as error:
            return _error(error)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "hybridflow"}
        is_one = request.path != "/v1/models"
        return _json(model if is_one else {"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.moved()
        try:
            holder = self._of(request)
            async with holder.reading:
                asked = self._read(await _body_of(request))
            completion = await self._completion(holder, asked)
            self.moved()
        except (RequestError, DataError) as error:  # DataError is raised by the chat template
            return _error(error)
        except ConversationOver as over:
            return _error(
                RequestError(f"the conversation has ended: {over}"), "context_length_exceeded"
            )
        return await _streamed(request, completion, asked) if asked.stream else _json(completion)


def _containers(text: str) -> int:
    """Count the lists and objects in a JSON text. Returns 0 if the number of brackets is within the
    limit."""
    if text.count("[") + text.count("{") <= _MOST_CONTAINERS:
        return 0
    data = text.encode("utf-8", "surrogatepass").replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    bytes_ = np.frombuffer(data, np.uint8)
    is_outside = np.cumsum(bytes_ == ord('"'), dtype=np.int32) % 2 == 0  # outside strings
    return int(np.count_nonzero(is_outside & ((bytes_ == ord("[")) | (bytes_ == ord("{")))))


async def _send_continue(request: web.Request) -> None:
    """Answer `Expect: 100-continue`. aiohttp's own handler fails if the client has disconnected."""
    with suppress(OSError):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _is_ours(record: logging.LogRecord) -> bool:
    """Filter log records: drop those about malformed requests and lost connections, because
    unauthenticated clients could fill the log with them."""
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
                f"the body contains {made} lists and objects; the limit is {_MOST_CONTAINERS}"
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
    kind = kind if status < _SERVER_ERROR else "server_error"
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
