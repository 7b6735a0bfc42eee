"""The connections of an HTTP server, bounded so that no client takes the places of another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from hybridflow.process.secret import Lobby

_MOST_STRANGERS = 256
_MOST_OF_A_KEY = 16  # a conversation has one request at a time
# connections accepted in one turn of the loop: in the five until its key is read, one keeps its
# place
_AT_A_TIME = 8
_BACKLOG = 1024
_LINGER_S = 5.0  # for the last answer, once a key is no longer valid


class Callers:
    """Who is connected: strangers, and the clients of each key. Every connection holds a descriptor
    of this process.

    Strangers have 256 places between them and a key's clients 16; for a further connection the one
    of these that has asked nothing for longest is closed. A client that is closed while it asks
    nothing connects again.
    """

    def __init__(self) -> None:
        self._strangers = Lobby(_MOST_STRANGERS)
        self._clients = dict[str, Lobby]()
        self._places = dict[asyncio.BaseTransport, ExitStack]()

    async def listen(self, host: str, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        """A server on a free port of the host, whose connections are strangers' until `know` says
        more."""
        listener = socket.create_server((host, 0))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _counted(protocol(), self), sock=listener, backlog=_AT_A_TIME
        )
        # asyncio takes its backlog for both: how many wait, and how many it accepts at once
        listener.listen(_BACKLOG)
        return server

    def came(self, transport: asyncio.Transport) -> None:
        """Give a new connection a place."""
        self._places[transport] = ExitStack()
        self._move(transport, self._strangers)

    def know(self, transport: asyncio.BaseTransport | None, key: str) -> None:
        """Note that a request with a valid key came over the connection."""
        if isinstance(transport, asyncio.Transport) and transport in self._places:
            self._move(transport, self._clients.setdefault(key, Lobby(_MOST_OF_A_KEY)))

    def left(self, transport: asyncio.Transport) -> None:
        """Free the place of a connection that has ended."""
        self._places.pop(transport).close()

    def forget(self, key: str) -> None:
        """Close the connections of a key that is no longer valid, in a few seconds: a client may
        read its last answer, and may not hold this process by not reading it."""
        if (clients := self._clients.pop(key, None)) is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, clients.close)

    def _move(self, transport: asyncio.Transport, lobby: Lobby) -> None:
        places = self._places[transport]
        places.close()
        places.enter_context(lobby.place(transport.abort))


def _counted(protocol: asyncio.Protocol, callers: Callers) -> asyncio.Protocol:
    return cast(asyncio.Protocol, _Counted(protocol, callers))


class _Counted:
    """The protocol of one connection, which is told of everything, with its place."""

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
