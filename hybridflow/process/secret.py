"""The job's secret, and mutual authentication over a plain socket: two processes prove to each
other that they know the secret. The driver generates the secret. Ranks receive it in a Ray call,
which requires Ray's own token; engines receive it in their environment, which only this user can
read. It is never sent over a connection that it protects: each end sends a random challenge and
answers the other end's challenge with an HMAC.
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
# credentials for the whole job, to be kept from processes that run third-party code
API_KEY = "HYBRIDFLOW_API_KEY"  # of the clients of `hybridflow serve`
_CREDENTIALS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", VARIABLE, API_KEY)
_drawn = dict[str, str]()


def job_secret() -> str:
    """Return the job's secret: the one given to this process, or one generated on the first
    call."""
    if given := os.environ.get(VARIABLE):
        return given
    # atomic: the driver starts ranks and engines in two threads, which must use the same secret
    return _drawn.setdefault(VARIABLE, secrets.token_hex(32))


def without_credentials() -> dict[str, str]:
    """Return this process's environment without Ray's token and the job's secret, for processes
    that do not need them."""
    kept: dict[str, str] = {}
    for name, value in os.environ.items():
        if name not in _CREDENTIALS:
            kept[name] = value
    return kept


def digest(*parts: str | bytes) -> bytes:
    """Return the HMAC-SHA256 of the parts under the job's secret. The encoding is unambiguous: two
    different lists of parts never give the same message.
    """
    whole = [part.encode() if isinstance(part, str) else part for part in parts]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in whole)
    return hmac.digest(job_secret().encode(), framed, "sha256")


class Greeting:
    """One end of a connection's mutual authentication.

    Args:
        purpose: purpose of the connection; must be the same at both ends.
        is_client: True if this end opened the connection. A client's proof is never accepted as a
            server's, or vice versa.
    """

    def __init__(self, purpose: str, is_client: bool) -> None:
        self._purpose = purpose
        self._is_client = is_client
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.theirs = b""  # the other end's challenge, once received

    def proof(self) -> bytes:
        """Return this end's proof: its answer to the other end's challenge."""
        return self._digest("client" if self._is_client else "server")

    def is_proven(self, proof: bytes) -> bool:
        """Return True if `proof` is the correct answer to this end's challenge."""
        return hmac.compare_digest(self._digest("server" if self._is_client else "client"), proof)

    def key(self) -> bytes:
        """Return the key with which the messages of this connection are signed."""
        return self._digest("key")

    def _digest(self, use: str) -> bytes:
        ordered = (
            (self.challenge, self.theirs) if self._is_client else (self.theirs, self.challenge)
        )
        return digest(use, self._purpose, *ordered)


def greet(connection: socket.socket, purpose: str, within_s: float) -> Greeting | None:
    """Perform the client's half of the mutual authentication over a blocking socket. Returns None
    if the other end does not know the secret.

    Args:
        within_s: timeout in seconds for the whole exchange. A peer that sends single bytes cannot
            extend it.

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
    """Perform the server's half of `greet` in an event loop; the caller sets the deadline. Returns
    None if the client does not know the secret. Such a client is sent nothing but the challenge.
    """
    greeting = Greeting(purpose, is_client=False)
    await write(greeting.challenge)
    greeting.theirs = await read(CHALLENGE_BYTES)
    if not greeting.is_proven(await read(PROOF_BYTES)):
        return None
    await write(greeting.proof())
    return greeting


class Lobby:
    """Limits the number of simultaneous connections, such as unauthenticated connections, to
    `most`, because each uses a file descriptor of this process. When the limit is reached, the
    oldest connection is closed. Foreign connections therefore evict each other, whereas a process
    of the job needs its slot only for milliseconds and reconnects if evicted.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._closing = dict[object, Callable[[], object]]()

    @contextmanager
    def place(self, close: Callable[[], object]) -> Iterator[None]:
        """Reserve a slot for one connection during the block. `close` is called if the connection
        is evicted."""
        if len(self._closing) >= self._most:
            self._closing.pop(next(iter(self._closing)))()
        mine = object()
        self._closing[mine] = close
        try:
            yield
        finally:
            self._closing.pop(mine, None)

    def close(self) -> None:
        """Close all connections that occupy a slot."""
        while self._closing:
            self._closing.pop(next(iter(self._closing)))()


def read_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read exactly `size` bytes. Raises OSError if the connection ends first, or at `deadline` (a
    `time.monotonic` time; None means no deadline).
    """
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return bytes(data)
