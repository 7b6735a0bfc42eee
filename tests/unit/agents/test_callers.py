"""Connections of the OpenAI endpoint: how many there may be, how long they may take, and how much
they may bring."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridflow.agents import callers, http_door
from hybridflow.agents.completions import CompletionServer
from hybridflow.agents.conversation import Conversation, Endpoint
from hybridflow.data.plain_text import PlainText
from hybridflow.data.tokenizer import Tokenizer
from tests.unit.agents.talks import FAMILIES, Engine, byte_tokenizer, conversation

QUESTION = [{"role": "user", "content": "What is 12 * 34?"}]


@pytest.fixture
def chatml(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, *FAMILIES["chatml"])


@asynccontextmanager
async def endpoint(held: Conversation) -> AsyncIterator[tuple[Endpoint, int]]:
    """The endpoint of a conversation, and its port."""
    server = CompletionServer()
    try:
        async with server.endpoint(held) as at:
            yield at, int(at.base_url.split(":")[2].partition("/")[0])
    finally:
        await server.close()


def request(
    key: str, body: bytes, size: int | None = None, method: str = "POST /v1/chat/completions"
) -> bytes:
    """A request; `size` is what it says of its body."""
    length = len(body) if size is None else size
    lines = (
        f"{method} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


async def answer(port: int, sent: bytes) -> tuple[int, str]:
    """Status and body of the answer to bytes over a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    size = int(head.partition("Content-Length: ")[2].split()[0])
    body = (await reader.readexactly(size)).decode()
    writer.close()
    return int(head.split()[1]), body


def test_strangers_and_a_keys_clients_take_places_from_their_own_kind(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_MOST_STRANGERS", 20)

    async def run() -> None:
        async with endpoint(conversation(chatml, Engine(chatml, "It is 408."))) as (at, port):
            ask = request(at.api_key, b"", method="GET /v1/models")
            known = [
                await asyncio.open_connection("127.0.0.1", port)
                for _ in range(callers._MOST_OF_A_KEY + 4)
            ]
            for reader, writer in known:
                writer.write(ask)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b"}]}")
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            assert (
                await answer(port, request(at.api_key, json.dumps({"messages": QUESTION}).encode()))
            )[0] == 200
            assert await _open(strangers) <= 20
            # the connection above has taken a place
            assert await _open(known) == callers._MOST_OF_A_KEY - 1
            _, last = known[-1]
            assert not last.is_closing()
            for _, writer in (*known, *strangers):
                writer.close()

    asyncio.run(run())


async def _open(links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    """How many the other end has not closed."""
    await asyncio.sleep(0.2)
    return sum(not reader.at_eof() and reader.exception() is None for reader, _ in links)


def test_a_key_that_is_no_longer_valid_holds_no_connection(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not that of a program that does not read its answer."""
    monkeypatch.setattr(callers, "_LINGER_S", 0.0)

    async def run() -> None:
        server = CompletionServer()
        async with server.endpoint(conversation(chatml, Engine(chatml, "It is 408."))) as at:
            port = int(at.base_url.split(":")[2].partition("/")[0])
            link = await asyncio.open_connection("127.0.0.1", port)
            link[1].write(request(at.api_key, b"", method="GET /v1/models"))
            await link[0].readuntil(b"}]}")
            assert await _open([link]) == 1
        assert await _open([link]) == 0
        link[1].close()
        await server.close()

    asyncio.run(run())


def test_a_body_that_does_not_come_is_given_up(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_door, "_BODY_S", 0.2)

    async def run() -> None:
        async with endpoint(conversation(chatml, Engine(chatml, "It is 408."))) as (at, port):
            status, said = await answer(port, request(at.api_key, b'{"messages":', 1000))
            assert status == 408 and "the body did not arrive" in said
            assert (
                await answer(port, request(at.api_key, json.dumps({"messages": QUESTION}).encode()))
            )[0] == 200

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": "x" * 2_000_000}], QUESTION * 90_000],
    ids=["one long", "many"],
)
def test_megabytes_that_cannot_be_the_prompt_are_not_encoded(
    chatml: Tokenizer, messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encode them takes seconds, in which no other conversation goes on."""

    async def run() -> None:
        held = conversation(chatml, Engine(chatml, "It is 408."))
        monkeypatch.setattr(Tokenizer, "render_chat", lambda *_: pytest.fail("they were rendered"))
        async with endpoint(held) as (at, port):
            status, said = await answer(
                port, request(at.api_key, json.dumps({"messages": messages}).encode())
            )
            assert status == 400 and "so they cannot match" in said

    asyncio.run(run())


def test_lists_beyond_number_are_not_made_and_brackets_in_a_text_are_none(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make millions of lists takes seconds, in which no other conversation goes on."""
    monkeypatch.setattr(http_door, "_MOST_CONTAINERS", 1000)

    async def run() -> None:
        async with endpoint(conversation(chatml, Engine(chatml, "It is 408."))) as (at, port):
            for text in (
                "[" * 3000 + "]" * 3000,
                '{"messages": [' + '{"a": "b"},' * 2000 + "0]}",
                '"\\"" [' * 2000,
            ):
                status, said = await answer(port, request(at.api_key, text.encode()))
                assert status == 400 and "lists and objects; the limit is 1000" in said
            brackets = json.dumps({"messages": [{"role": "user", "content": '[{"\\' * 2000}]})
            status, said = await answer(port, request(at.api_key, brackets.encode()))
            assert status == 400 and "must render to the row's prompt" in said

    asyncio.run(run())


def test_more_messages_than_there_is_room_for_end_the_conversation_unread(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        held = conversation(chatml, Engine(chatml, "It is 408."), room=100)
        await held.answer()
        monkeypatch.setattr(Tokenizer, "continuation", lambda *_: pytest.fail("they were rendered"))
        with pytest.raises(Exception, match="no room for more tokens"):
            held.show([{"role": "user", "content": "x"}] * 101)

    asyncio.run(run())


@pytest.mark.slow
def test_of_a_long_observation_only_what_is_kept_is_encoded(chatml: Tokenizer) -> None:
    """The cut is that of the whole text, and what it costs does not grow with the text."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices(string.ascii_letters, k=draw.randrange(1, 12))) for _ in range(12_000)
    ]
    text = "  ".join(words) + " é漢字 " * 100
    plain = PlainText(chatml._hf)
    backend = plain._backend
    seen = []

    class Counting:
        def encode(self, part: str, **how: Any) -> Any:
            seen.append(len(part))
            return backend.encode(part, **how)

    plain.__dict__["_backend"] = Counting()
    for most in (1, 7, 100, 3000):
        offsets = backend.encode(text, add_special_tokens=False).offsets
        seen.clear()
        assert plain.cut(text, most) == text[: offsets[most][0]]
        assert sum(seen) <= 40 * (most + 64)
    short = "é" * 50
    assert plain.cut(short, 1000) == short and plain.cut(short, None) == short
