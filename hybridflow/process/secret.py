"""The job's secret, and how two processes prove to each other over a plain socket that they know
it.

The driver draws the secret. It reaches the ranks by a Ray call, which asks for Ray's own token, and
the ranks' engines by their environment, which the kernel shows to this user only. It never travels
over a connection that it protects: both ends send a random challenge and answer the other's with an
HMAC.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

VARIABLE = "HYBRIDFLOW_JOB_SECRET"
CHALLENGE_BYTES = PROOF_BYTES = 32
# what opens doors to the whole job: no business of processes that run code of others
_CREDENTIALS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", VARIABLE)
_drawn = dict[str, str]()


def job_secret() -> str:
    """The job's secret: what this process was given, else drawn on the first call."""
    if given := os.environ.get(VARIABLE):
        return given
    # in one step: the driver starts ranks and engines in two threads, which must be given the same
    return _drawn.setdefault(VARIABLE, secrets.token_hex(32))


def without_credentials() -> dict[str, str]:
    """This process's environment without Ray's token and the job's secret, for processes that have
    no use for them."""
    kept: dict[str, str] = {}
    for name, value in os.environ.items():
        if name not in _CREDENTIALS:
            kept[name] = value
    return kept


def digest(*parts: str | bytes) -> bytes:
    """HMAC-SHA256 of the parts under the job's secret; no two lists of parts give the same
    message."""
    whole = [part.encode() if isinstance(part, str) else part for part in parts]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in whole)
    return hmac.digest(job_secret().encode(), framed, "sha256")


class Greeting:
    """One end of the mutual proof on one connection.

    Args:
        purpose: what the connection is for; both ends must name the same.
        is_client: whether this end has connected. An answer of one end never serves as the other's.
    """

    def __init__(self, purpose: str, is_client: bool) -> None:
        self._purpose = purpose
        self._is_client = is_client
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.theirs = b""  # the other end's challenge, once it has come

    def proof(self) -> bytes:
        """The answer to the other end's challenge."""
        return self._digest("client" if self._is_client else "server")

    def is_proven(self, proof: bytes) -> bool:
        """Whether the other end has answered our challenge."""
        return hmac.compare_digest(self._digest("server" if self._is_client else "client"), proof)

    def key(self) -> bytes:
        """A key for the messages of this connection alone."""
        return self._digest("key")

    def _digest(self, use: str) -> bytes:
        ordered = (
            (self.challenge, self.theirs) if self._is_client else (self.theirs, self.challenge)
        )
        return digest(use, self._purpose, *ordered)


def greet(connection: socket.socket, purpose: str, within_s: float) -> Greeting | None:
    """The client's end of both proofs over a blocking socket. None when the other end is a
    stranger.

    Args:
        within_s: seconds for all of it: one that sends a byte now and then is given up as well.

    Raises:
        OSError: the connection broke, or the other end is silent or slow.
    """
    deadline = time.monotonic() + within_s
    greeting = Greeting(purpose, is_client=True)
    connection.sendall(greeting.challenge)
    greeting.theirs = read_exactly(connection, CHALLENGE_BYTES, deadline)
    connection.sendall(greeting.proof())
    return greeting if greeting.is_proven(read_exactly(connection, PROOF_BYTES, deadline)) else None


async def greet_client(
    read: Callable[[int], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]], purpose: str
) -> Greeting | None:
    """The server's end of `greet`, in an event loop; its caller sets the deadline. None for a
    stranger, who is told nothing more than a challenge."""
    greeting = Greeting(purpose, is_client=False)
    await write(greeting.challenge)
    greeting.theirs = await read(CHALLENGE_BYTES)
    if not greeting.is_proven(await read(PROOF_BYTES)):
        return None
    await write(greeting.proof())
    return greeting


class Lobby:
    """Connections that share `most` places, since each holds a descriptor of this process: those
    whose other ends have proven nothing yet, for example. For a further one the oldest is closed,
    so that strangers take places from each other; a process of the job needs its own for
    milliseconds, and connects again."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._closing = dict[object, Callable[[], object]]()

    @contextmanager
    def place(self, close: Callable[[], object]) -> Iterator[None]:
        """A place for one connection inside of the block; `close` ends it when it is the oldest."""
        if len(self._closing) >= self._most:
            self._closing.pop(next(iter(self._closing)))()
        mine = object()
        self._closing[mine] = close
        try:
            yield
        finally:
            self._closing.pop(mine, None)

    def close(self) -> None:
        """End all connections that have a place."""
        while self._closing:
            self._closing.pop(next(iter(self._closing)))()


def read_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """So many bytes, by the deadline of `time.monotonic` if there is one. OSError when the
    connection ends before."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return bytes(data)
