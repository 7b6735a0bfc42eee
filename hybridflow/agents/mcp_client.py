"""Tools provided by Model Context Protocol servers (`rollout.agent.mcp_servers`).

Connections run in an event loop in a separate thread of this process, so they stay alive while
conversations wait for engines. A server that is started as a program is a child of this process and
exits with it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult
from mcp_types import Tool as Declared

from hybridflow.agents.mcp_process import MOST_BYTES, program
from hybridflow.agents.tools.base import Tool, ToolLostError
from hybridflow.config.check_agent import McpServer, mcp_servers
from hybridflow.config.derived import run_dir
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.process.surroundings import is_own

_KEY = "rollout.agent.mcp_servers"
_END_S = 10.0  # for closing the connections when the process exits
# pause before reconnecting; doubled after each failure
_PAUSE_S = 1.0
_MOST_PAUSE_S = 30.0
_MOST_PAGES = 1000  # of the list of tools
T = TypeVar("T")
_log = logging.getLogger(__name__)
_opened: dict[str, _Server] = {}


def offered(config: RunConfig) -> list[Tool]:
    """Return the tools of all servers of `rollout.agent`. Starts servers that are not yet running.

    Raises:
        ConfigError: a server cannot be started or reached, or lacks a tool named in the config.
    """
    found: list[Tool] = []
    for name, settings in mcp_servers(config.rollout.agent).items():
        timeout_s = config.rollout.agent.tool_timeout_s
        key = json.dumps([name, repr(settings), timeout_s, os.getpid()])
        if key not in _opened:
            _opened[key] = _Server(
                name, settings, timeout_s, run_dir(config) / "logs" / f"mcp-{name}.log"
            )
        found += _opened[key].tools
    return found


class _Server:
    """A connection to one server. A lost connection is re-established, up to a limit.

    Attributes:
        tools: the server's tools, as declared on the first connection.
    """

    def __init__(self, name: str, settings: McpServer, timeout_s: float, log_path: Path) -> None:
        self.key = f"{_KEY}.{name}"
        self.settings = settings
        self.timeout_s = timeout_s
        self.log_path = log_path
        needed = list(settings.env)
        if settings.token_env:
            needed.append(settings.token_env)
        for variable in needed:
            if not os.environ.get(variable):
                raise ConfigError(
                    f"{self.key} requires the environment variable {variable}, but it is not set"
                )
        self._limit = RestartLimit(settings.max_restarts)
        self._client: Client | None = None
        # why the connection is closed for good, and why the last one was lost
        self._given_up = self._lost = ""
        self._before = ""  # why the previous connection was lost
        self._status = ""  # HTTP status of the last failed request
        self._changed: asyncio.Event | None = None
        self._declared: list[Declared] = []
        self._task = _submit(self._stay_connected())
        try:
            self._declared = _submit(self._first()).result(settings.start_timeout_s)
        except TimeoutError as error:
            self.close()
            raise ConfigError(
                f"{self.key} did not list its tools within {settings.start_timeout_s:g} s"
            ) from error
        self.tools = [
            self._tool(one)
            for one in self._declared
            if not settings.tools or one.name in settings.tools
        ]
        has = [one.name for one in self._declared]
        if not has:
            self.close()
            raise ConfigError(f"{self.key}: the server offers no tools")
        if missing := [one for one in settings.tools if one not in has]:
            self.close()
            raise ConfigError(
                f"{self.key}.tools: the server offers no {missing[0]} (it offers: "
                f"{', '.join(has) or 'none'})"
            )

    def close(self) -> None:
        """Close the connection, and stop the server's program if there is one."""
        self._task.cancel()
        with suppress(Exception, asyncio.CancelledError):
            self._task.result(_END_S)

    def _tool(self, declared: Declared) -> Tool:
        async def function(**arguments: Any) -> str:
            return await asyncio.wrap_future(_submit(self._call(declared.name, arguments)))

        description = (declared.description or declared.title or "").strip()
        return Tool(declared.name, function, description, declared=declared.input_schema)

    # ---- in the thread of the connections

    async def _first(self) -> list[Declared]:
        """Wait for the first connection and return the tools. Raises ConfigError if it fails."""
        await self._connected()
        if self._given_up:
            raise ConfigError(f"{self.key}: {self._given_up}")
        return self._declared

    async def _connected(self) -> Client | None:
        while self._client is None and not self._given_up:
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()
        return self._client

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _stay_connected(self) -> None:
        """Connect, and reconnect after each loss until the limit is reached."""
        try:
            await self._connect()
        finally:
            self._given_up = self._given_up or "the server was closed"
            self._tell()

    async def _connect(self) -> None:
        failures = 0  # since the last successful connection
        while not self._given_up:
            self._before = self._lost or self._before
            self._lost = ""
            self._status = ""
            over = asyncio.Event()
            try:
                async with asyncio.timeout(None) as limit:
                    limit.reschedule(
                        asyncio.get_running_loop().time() + self.settings.start_timeout_s
                    )
                    async with Client(self._transport(partial(self._lose, over))) as client:
                        self._declared = self._declared or await _listed(client)
                        limit.reschedule(None)
                        self._client = client
                        self._over = over
                        failures = 0
                        self._tell()
                        await over.wait()
                        self._client = None
            except Exception as error:
                # connection errors; the package does not document their types
                self._lost = self._lost or f"{_said(error)}{self._status}"
            self._client = None
            first = not self._declared
            if first or not self._limit.take():
                again = (
                    ""
                    if first
                    else f" (restarted {self.settings.max_restarts} times within an hour)"
                )
                self._given_up = f"the server cannot be used: {self._lost}{again}"
            else:
                _log.warning("lost the connection to %s, reconnecting: %s", self.key, self._lost)
                await asyncio.sleep(min(_PAUSE_S * failures, _MOST_PAUSE_S))
                failures = 2 * failures + 1
            self._tell()

    def _lose(self, over: asyncio.Event, why: str) -> None:
        self._lost = self._lost or why
        over.set()

    def _transport(self, lose: Callable[[str], None]) -> AbstractAsyncContextManager[Any]:
        if self.settings.url is None:
            return program(self.settings, self.log_path, lose)
        return _over_http(self.settings, self.timeout_s, self._refused)

    async def _refused(self, response: httpx2.Response) -> None:
        if response.request.method == "POST" and response.status_code >= HTTPStatus.BAD_REQUEST:
            self._status = f" (status {response.status_code})"

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text. Raises TimeoutError after
        `rollout.agent.tool_timeout_s`."""
        try:
            async with asyncio.timeout(self.timeout_s):
                client = await self._connected()
        except TimeoutError as error:
            raise ToolLostError(
                f"the connection to {self.key} was lost and could not be restored: "
                f"{self._lost or self._before}"
            ) from error
        if client is None:
            raise ToolLostError(f"{self.key}: {self._given_up}")
        over = self._over
        async with asyncio.timeout(self.timeout_s):
            try:
                return _text(await client.call_tool(name, arguments))
            except MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    return f"error: {error.message}"
                self._lose(over, error.message)
                raise ToolLostError(
                    f"the connection to {self.key} was lost during a call to {name}: {self._lost}"
                ) from error
            except httpx2.TransportError as error:
                self._lose(over, _said(error))
                raise ToolLostError(
                    f"the connection to {self.key} was lost during a call to {name}: {self._lost}"
                ) from error


async def _listed(client: Client) -> list[Declared]:
    found = list[Declared]()
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _text(result: CallToolResult) -> str:
    """Format a result as text for the policy. Each non-text block is replaced with the name of its
    type.
    """
    parts = []
    for block in result.content:
        parts.append(block.text if block.type == "text" else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ("error: " if result.is_error else "") + "\n".join(parts)


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (
        str(error)
        if isinstance(error, ConfigError)
        else f"{type(error).__name__}: {error}".rstrip(": ")
    )


@asynccontextmanager
async def _over_http(
    settings: McpServer, timeout_s: float, look: Callable[[httpx2.Response], Awaitable[None]]
) -> AsyncIterator[Any]:
    """Open the streams to an HTTP server for `mcp.Client`. `look` is awaited with each HTTP
    response."""
    assert settings.url is not None
    headers = (
        {"Authorization": f"Bearer {os.environ[settings.token_env]}"} if settings.token_env else {}
    )
    hooks = {"response": [look, _bound]}
    timeout = httpx2.Timeout(30.0, read=timeout_s)
    async with (
        httpx2.AsyncClient(
            headers=headers, timeout=timeout, event_hooks=hooks, trust_env=not is_own(settings.url)
        ) as http,
        streamable_http_client(
            settings.url, http_client=http, max_sse_event_size=MOST_BYTES
        ) as streams,
    ):
        yield streams


async def _bound(response: httpx2.Response) -> None:
    if response.request.method == "POST":
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    """A response stream that is limited to `MOST_BYTES`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for part in self._stream:
            read += len(part)
            if read > MOST_BYTES:
                raise httpx2.StreamError(f"the response exceeds {MOST_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


# ---- the thread


@cache
def _events() -> asyncio.AbstractEventLoop:
    """Return the event loop for connections. Its thread starts the programs and runs until this
    process exits."""
    events = asyncio.new_event_loop()
    threading.Thread(target=events.run_forever, name="mcp", daemon=True).start()
    atexit.register(close_all)
    return events


def _submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _events())


def close_all() -> None:
    """Close all connections of this process, and stop their programs."""
    for key in list(_opened):
        _opened.pop(key).close()
