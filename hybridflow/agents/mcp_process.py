"""A Model Context Protocol server that runs as a child process and exchanges JSON messages, one per
line, over standard input and output.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from hybridflow.config.check_agent import McpServer
from hybridflow.errors import ConfigError
from hybridflow.process import children
from hybridflow.process.secret import without_credentials

MOST_BYTES = 64 << 20  # per message; it may contain a result twice, as text and as data
# variables passed on to the program
_GIVEN = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_END_S = 2.0  # for the program to exit after its input is closed, and then after SIGTERM


def environment(settings: McpServer) -> dict[str, str]:
    """Return the environment variables for the program. Secrets are passed only if they are listed
    by name."""
    return {
        name: value
        for name, value in without_credentials().items()
        if name in (*_GIVEN, *settings.env)
    }


@asynccontextmanager
async def program(
    settings: McpServer, log_path: Path, lose: Callable[[str], None]
) -> AsyncIterator[Any]:
    """Start the program, and yield its streams of incoming and outgoing messages for `mcp.Client`.

    Args:
        log_path: receives the program's standard error.
        lose: called with the reason once no more messages can arrive.

    Raises:
        ConfigError: the program does not exist.
    """
    given = environment(settings)
    if shutil.which(settings.command[0], path=given.get("PATH")) is None:
        raise ConfigError(f"program {settings.command[0]!r} not found in PATH")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", children.__file__, str(os.getpid()), *settings.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=given,
            limit=MOST_BYTES,
            start_new_session=True,
        )
    to_us, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_them = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read(process, to_us, lose)),
        asyncio.create_task(_write(process, to_them, lose)),
    ]
    try:
        yield incoming, outgoing
    finally:
        await asyncio.shield(_end(process, tasks))
        for stream in (incoming, outgoing, to_us, to_them):
            stream.close()


async def _read(
    process: asyncio.subprocess.Process, to_us: Any, lose: Callable[[str], None]
) -> None:
    assert process.stdout is not None
    with to_us:
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                lose(f"it sent a message larger than {MOST_BYTES} bytes")
                return
            if not line:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _END_S)
                code = process.returncode
                lose("it closed its output" if code is None else f"it exited with code {code}")
                return
            if (message := _message(line)) is not None:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await to_us.send(message)


def _message(line: bytes) -> SessionMessage | None:
    """Parse a line as a message. Returns None for other output, such as a stray print.

    Invalid UTF-8 becomes U+FFFD, and an unpaired surrogate becomes a question mark.
    """
    text = line.decode(errors="replace")
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError:
        with suppress(ValueError, RecursionError):
            again = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
            return SessionMessage(jsonrpc_message_adapter.validate_json(again, by_name=False))
    return None


async def _write(
    process: asyncio.subprocess.Process, to_them: Any, lose: Callable[[str], None]
) -> None:
    assert process.stdin is not None
    with to_them:
        async for message in to_them:
            process.stdin.write(
                message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            )
            try:
                await process.stdin.drain()
            except ConnectionError:
                lose("it closed its input")
                return


async def _end(process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]) -> None:
    """Stop the program and its descendants: first close its input, then send SIGTERM, then
    SIGKILL."""
    assert process.stdin is not None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # descendants that are still running
