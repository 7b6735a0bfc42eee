"""Connection limits for an HTTP server, so that no client can use up another client's slots."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from hybridflow.process.secret import Lobby

_MOST_STRANGERS = 256
_MOST_OF_A_KEY = 16  # a conversation has one request at a time
# connections accepted per loop iteration: reading a key takes five, and an open connection must not
# be evicted before that
_AT_A_TIME = 8
_BACKLOG = 1024
_LINGER_S = 5.0  # time to read the last answer after a key is revoked


class Callers:
    """The open connections of a server. Their number is limited, because each uses a file
    descriptor. At most 256 unauthenticated connections and, for each API key, `most_of_a_key`
    connections may be open. When a limit is reached, accepting a new connection closes the longest
    idle connection that counts towards the same limit. A client whose idle connection is closed can
    reconnect.
    """

    def __init__(self, most_of_a_key: int = _MOST_OF_A_KEY) -> None:
        self._most_of_a_key = most_of_a_key
        self._strangers = Lobby(_MOST_STRANGERS)
        self._clients = dict[str, Lobby]()
        self._places = dict[asyncio.BaseTransport, ExitStack]()

    async def listen(
        self, host: str, protocol: Callable[[], asyncio.Protocol], port: int = 0
    ) -> asyncio.Server:
        """Start a server on the given host and port. By default, a free port is chosen. Connections
        count as unauthenticated until `know` is called."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _counted(protocol(), self), sock=listener, backlog=_AT_A_TIME
        )
        # asyncio uses its backlog both as the listen queue and as the number of connections it
        # accepts at once
        listener.listen(_BACKLOG)
        return server

    def came(self, transport: asyncio.Transport) -> None:
        """Register a connection that has just been opened."""
        self._places[transport] = ExitStack()
        self._move(transport, self._strangers)

    def know(self, transport: asyncio.BaseTransport | None, key: str) -> None:
        """Record that the connection has received a request with a valid API key."""
        if isinstance(transport, asyncio.Transport) and transport in self._places:
            self._move(transport, self._clients.setdefault(key, Lobby(self._most_of_a_key)))

    def left(self, transport: asyncio.Transport) -> None:
        """Unregister a connection that has been closed."""
        self._places.pop(transport).close()

    def forget(self, key: str) -> None:
        """Close the connections of a revoked key after a few seconds. This gives clients time to
        read the last answer, but a client that does not read cannot block this process.
        """
        if (clients := self._clients.pop(key, None)) is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, clients.close)

    def _move(self, transport: asyncio.Transport, lobby: Lobby) -> None:
        places = self._places[transport]
        places.close()
        places.enter_context(lobby.place(transport.abort))


def _counted(protocol: asyncio.Protocol, callers: Callers) -> asyncio.Protocol:
    return cast(asyncio.Protocol, _Counted(protocol, callers))


class _Counted:
    """The asyncio protocol of one connection. Reports to `Callers` when the connection opens and
    closes, and forwards all other events."""

    def __init__(self, protocol: asyncio.Protocol, callers: Callers) -> None:
        self._protocol = protocol
        self._callers = callers

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._callers.came(transport)
        self._protocol.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._callers.left(self._transport)
        self._protocol.connection_lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)
