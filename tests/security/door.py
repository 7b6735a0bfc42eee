"""Attempts on the OpenAI endpoint of an agent loop: `python -m tests.security.door HOST:PORT KEY
NUMBER OTHER` makes them as uid 65534 and prints one JSON list of (attempt, what it got, "" for
nothing). KEY "" is a stranger's, otherwise that of a conversation whose program means harm; OTHER
is a JSON object that says what is known of another conversation. NUMBER is how many connections it
makes at once.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

NOBODY = 65534
WAIT_S = 2.0
DRIP_S = 2.0
MOST_BYTES = 48 << 20  # three times what a request may have
QUESTION = [{"role": "user", "content": "What is 12 * 34?"}]
PATH = "/v1/chat/completions"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n\r\n"
Attempt = tuple[str, Callable[[], str]]


class Door:
    """One endpoint, and the key to try.

    Args:
        address: HOST:PORT.
        key: of a conversation; "" for a stranger.
        number: of connections to make at once.
        other: what is known of another conversation.
        is_ours: False for another server, where it is enough that nothing is answered: how it reads
            requests of two readings, and what it holds of one without an end, are its own.
    """

    def __init__(
        self, address: str, key: str, number: int, other: dict[str, Any], *, is_ours: bool = True
    ) -> None:
        host, _, port = address.rpartition(":")
        self.address = (host, int(port))
        self.number = number
        self.other = other
        self.is_known = bool(key)
        self.is_ours = is_ours
        self.key = key or secrets.token_urlsafe(32)
        self.bearer = f"Bearer {self.key}"

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(self.address, WAIT_S)

    def head(
        self, *lines: str, path: str = PATH, method: str = "POST", key: str | None = None
    ) -> bytes:
        """A request up to its body."""
        first = [
            f"{method} {path} HTTP/1.1",
            "Host: x",
            f"Authorization: {self.bearer if key is None else key}",
        ]
        return "\r\n".join([*first, *lines, "", ""]).encode("utf-8", "surrogateescape")

    def whole(self, body: Any, *lines: str, **more: Any) -> bytes:
        """A request with a body of JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(f"Content-Length: {len(data)}", *lines, **more) + data

    def ask(self, *parts: bytes, pause_s: float = 0.0, half_close: bool = False) -> list[int]:
        """The statuses of all answers to bytes that are sent over one connection."""
        with self.connect() as link:
            with suppress(OSError):
                for part in parts:
                    link.sendall(part)
                    time.sleep(pause_s)
                if half_close:
                    link.shutdown(socket.SHUT_WR)
            return statuses(read_all(link))


def read_all(link: socket.socket) -> bytes:
    """What comes until the other end closes, or says nothing for a while."""
    said = b""
    link.settimeout(WAIT_S / 3)
    with suppress(OSError):
        while len(said) < 1 << 20 and (part := link.recv(1 << 16)):
            said += part
    return said


def statuses(said: bytes) -> list[int]:
    """The status of each answer."""
    return [
        int(part[:3])
        for part in said.replace(b"HTTP/1.0 ", b"HTTP/1.1 ").split(b"HTTP/1.1 ")[1:]
        if part[:3].isdigit()
    ]


def got(found: list[int]) -> str:
    """The statuses of answers that were not refusals; 100 only asks to go on."""
    return " ".join(str(status) for status in found if 200 <= status < 400)


# ---- attempts


def on_keys(door: Door) -> Iterator[Attempt]:
    """Keys that open nothing, and what is another conversation's."""
    guesses = {
        "no key": "",
        "a guessed key": f"Bearer {secrets.token_urlsafe(32)}",
        "a key of 8 kB": "Bearer " + "A" * 8000,
    }
    guesses |= {
        "another scheme": f"Basic {door.key}",
        "a prefix": f"Bearer {str(door.other.get('key', 'x'))[:-1]}",
    }
    guesses |= {
        "the key twice": f"Bearer {door.key}, Bearer {door.key}",
        "bytes": "Bearer \udcff\udcfe",
    }
    for name, key in guesses.items():
        if name == "the key twice" and not door.is_known:
            continue
        for path, method in (("/v1/models", "GET"), (PATH, "POST")):
            request = door.whole({"messages": QUESTION}, path=path, method=method, key=key)
            yield f"{method} {path} with {name}", lambda request=request: got(door.ask(request))
    theirs = door.other.get("messages", QUESTION)
    ids = {
        "id": door.other.get("id", "chatcmpl-0"),
        "tool_call_id": door.other.get("call", "call_0"),
    }
    bodies = {
        "messages of another conversation": {"messages": theirs},
        "the id of another's answer": {"messages": QUESTION, "id": ids["id"]},
        "the id of another's call": {
            "messages": [{"role": "tool", "content": "1", "tool_call_id": ids["tool_call_id"]}]
        },
        "the name of another": {"messages": theirs, "user": door.other.get("key", "x")},
        "another's key in a cookie": {"messages": theirs},
    }
    for name, body in bodies.items():
        lines = (f"Cookie: key={door.other.get('key', 'x')[:8]}",) if "cookie" in name else ()
        yield f"send {name}", lambda body=body, lines=lines: got(door.ask(door.whole(body, *lines)))


def on_paths(door: Door) -> Iterator[Attempt]:
    """Other paths and methods, without a key of any conversation."""
    for path in (
        "/",
        "/metrics",
        "/health",
        "/v1/../v1/models",
        "//v1/models",
        "/v1/%6dodels",
        "/v1/files",
        "/docs",
    ):
        yield (
            f"GET {path}",
            lambda path=path: got(door.ask(door.head(path=path, method="GET", key=""))),
        )
    for method in ("CONNECT", "TRACE", "PUT", "DELETE", "PATCH", "X" * 300):
        yield f"{method[:9]}", lambda method=method: got(door.ask(door.head(method=method, key="")))
    absolute = "http://127.0.0.1:9/v1/models"
    yield (
        "ask for an address of another",
        lambda: got(door.ask(door.head(path=absolute, method="GET", key=""))),
    )
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: x",
        "Sec-WebSocket-Version: 13",
    )
    yield (
        "upgrade to a websocket",
        lambda: got(door.ask(door.head(*upgrade, path="/v1/models", method="GET", key=""))),
    )


def on_framing(door: Door) -> Iterator[Attempt]:
    """Requests of two readings: at most one answer, and none to what is smuggled behind or
    inside."""
    body = json.dumps({"messages": [{"role": "nobody"}]}).encode()
    hidden = SMUGGLED.replace(b"KEY", door.key.encode())
    size = len(body)
    chunk = f"{len(body):x}".encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"
    cases = {
        "two lengths": door.head(f"Content-Length: {size}", f"Content-Length: {size + len(hidden)}")
        + body
        + hidden,
        "a list of lengths": door.head(f"Content-Length: {size}, {size + len(hidden)}")
        + body
        + hidden,
        "chunks and a length": door.head("Transfer-Encoding: chunked", f"Content-Length: {size}")
        + chunk
        + hidden,
        "a length and chunks": door.head(
            f"Content-Length: {len(chunk) + len(hidden)}", "Transfer-Encoding: chunked"
        )
        + chunk
        + hidden,
        "chunks twice": door.head("Transfer-Encoding: chunked", "Transfer-Encoding: identity")
        + chunk
        + hidden,
        "chunks not last": door.head("Transfer-Encoding: chunked, gzip") + chunk + hidden,
        "chunks with a space": door.head("Transfer-Encoding : chunked", f"Content-Length: {size}")
        + body
        + hidden,
        "a folded line": door.head("Transfer-Encoding:\r\n chunked", f"Content-Length: {size}")
        + chunk
        + hidden,
        "a length with a sign": door.head(f"Content-Length: +{size}") + body + hidden,
        "a negative length": door.head("Content-Length: -1") + body + hidden,
        "a length in hex": door.head(f"Content-Length: 0x{size:x}") + body + hidden,
        "a chunk beyond 64 bits": door.head("Transfer-Encoding: chunked")
        + b"ffffffffffffffff1\r\n"
        + body
        + hidden,
        "a chunk with a sign": door.head("Transfer-Encoding: chunked") + b"-1\r\n" + body + hidden,
        "a long extension of a chunk": door.head("Transfer-Encoding: chunked")
        + b"1;"
        + b"x" * 200_000
        + b"\r\n"
        + hidden,
        "a line that ends bare": door.head(f"X: a\nContent-Length: {size}\nY: b") + body + hidden,
        "a header with a zero": door.head(f"X: a\0b\r\nContent-Length: {size}") + body + hidden,
    }
    for name, request in cases.items():
        yield (
            f"smuggle behind {name}",
            lambda request=request: _smuggled(door, door.ask(request, half_close=True)),
        )


def _smuggled(door: Door, found: list[int]) -> str:
    """More than one refusal would be an answer to what was hidden."""
    is_two = door.is_ours and len(found) > 1
    return f"answers {found}" if is_two or got(found) else ""


def on_sizes(door: Door) -> Iterator[Attempt]:
    """More than there is room for: announced, streamed, packed, nested, in the head."""
    block = b" " * (1 << 20)
    yield (
        "announce 10 GB and send them",
        lambda: _flood(door, door.head("Content-Length: 10000000000"), block),
    )
    stream = b"100000\r\n" + block + b"\r\n"
    yield (
        "stream 10 GB in chunks",
        lambda: _flood(door, door.head("Transfer-Encoding: chunked"), stream),
    )
    packed = gzip.compress(bytes(2 * MOST_BYTES), 1)
    yield (
        "pack 96 MB into little",
        lambda: got(door.ask(door.whole(packed, "Content-Encoding: gzip"))),
    )
    yield (
        "a header without an end",
        lambda: _flood(door, door.head()[:-2] + b"X: ", b"a" * (1 << 16)),
    )
    yield "headers without an end", lambda: _flood(door, door.head()[:-2], b"X: a\r\n" * (1 << 13))
    yield "a path of 1 MB", lambda: got(door.ask(door.head(path="/" + "a" * (1 << 20), key="")))
    documents = {
        "nested lists": b"[" * 200_000,
        "nested messages": b'{"messages":' * 50_000,
        "a number of 10,000 digits": b'{"messages": ' + b"9" * 10_000 + b"}",
        "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "no number": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}',
        "bytes": bytes(range(256)),
        "another encoding": '{"messages": []}'.encode("utf-16"),
        "15 MB of text": json.dumps(
            {"messages": [{"role": "user", "content": "x" * (15 << 20)}]}
        ).encode(),
        "5 million lists": b'{"messages":[' + b"[]," * (5 << 20) + b"[]]}",
        "100,000 messages": json.dumps({"messages": QUESTION * 100_000}).encode(),
    }
    for name, data in documents.items():
        yield f"send {name}", lambda data=data: got(door.ask(door.whole(data)))
    encoded = door.whole(b"{}", "Content-Type: application/json; charset=no-such")
    yield "name an encoding that is none", lambda: got(door.ask(encoded))


def _flood(door: Door, head: bytes, block: bytes) -> str:
    """What came of sending without an end; that all of it was taken in is a success too."""
    sent = 0
    with door.connect() as link:
        try:
            link.sendall(head)
            while sent < 2 * MOST_BYTES:
                link.sendall(block)
                sent += len(block)
        except OSError:
            return got(statuses(read_all(link)))
        answers = statuses(read_all(link))
    return got(answers) if answers or not door.is_ours else f"sent {sent} bytes and was not refused"


def on_time(door: Door) -> Iterator[Attempt]:
    """Requests that come slowly, in part, or never; answers that nobody reads."""
    body = json.dumps({"messages": QUESTION}).encode()
    whole = door.whole({"messages": [{"role": "nobody"}]})
    yield "a byte now and then of a head", lambda: _drip(door, b"", door.head("X: " + "y" * 100))
    yield (
        "a byte now and then of a body",
        lambda: _drip(door, door.head(f"Content-Length: {10**6}"), body * 10),
    )
    for name, sent in (
        ("nothing", b""),
        ("half a head", whole[:40]),
        ("a head", door.head("Content-Length: 9")),
    ):
        yield f"close half after {name}", lambda sent=sent: got(door.ask(sent, half_close=True))
        yield f"reset after {name}", lambda sent=sent: _reset(door, sent)
        yield f"{door.number} idle connections after {name}", lambda sent=sent: _idle(door, sent)
    yield (
        "expect to be told to go on",
        lambda: got(door.ask(door.head("Content-Length: 100", "Expect: 100-continue"))),
    )
    yield (
        "1,000 requests at once, no answer read",
        lambda: _unread(door, door.head(path="/v1/nothing", method="GET") * 1000),
    )
    for name, words in (
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
        ("zeros", bytes(1 << 16)),
        ("HTTP/0.9", b"GET /v1/models\r\n\r\n"),
    ):
        yield f"speak {name}", lambda words=words: got(door.ask(words, half_close=True))


def _drip(door: Door, head: bytes, rest: bytes) -> str:
    with door.connect() as link, suppress(OSError):
        link.sendall(head)
        until = time.monotonic() + DRIP_S
        for byte in rest:
            if time.monotonic() > until:
                break
            link.sendall(bytes([byte]))
            time.sleep(0.1)
        return got(statuses(read_all(link)))
    return ""


def _reset(door: Door, sent: bytes) -> str:
    with door.connect() as link:
        link.sendall(sent)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return ""


def _idle(door: Door, sent: bytes) -> str:
    """Hold many connections for a while; how many are left in the end is for the server to say."""
    with ExitStack() as stack:
        links = []
        for _ in range(door.number):
            with suppress(OSError):
                links.append(stack.enter_context(door.connect()))
                links[-1].sendall(sent)
        time.sleep(DRIP_S)
    return ""


def _unread(door: Door, words: bytes) -> str:
    with door.connect() as link, suppress(OSError):
        link.sendall(words)
        time.sleep(DRIP_S)
    return ""


KINDS = (on_keys, on_paths, on_framing, on_sizes, on_time)


def attempts(door: Door) -> list[tuple[str, str]]:
    """What each attempt got. They are made many at a time."""

    def one(attempt: Attempt) -> tuple[str, str]:
        name, act = attempt
        try:
            return name, act()
        except OSError:
            return name, ""  # refused, reset, or no connection

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, [attempt for kind in KINDS for attempt in kind(door)]))


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(16_384, hard), hard))
    "x".encode("idna")  # loaded now: what is below root's home cannot be read afterwards
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    print(
        json.dumps(
            attempts(Door(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))
        )
    )
