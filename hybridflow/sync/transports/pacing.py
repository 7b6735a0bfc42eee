"""Connections within a host are not paced.

BBR, the default congestion control of many machines, paces what it sends with timers: a fifth of a sync's processor
time where nothing can be congested. Between hosts the choice is the administrator's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from stat import S_ISSOCK


def unpace(connection: socket.socket) -> None:
    """Take `reno` for a connection whose ends have one address; nothing happens for others, or where the kernel does
    not allow it."""
    with suppress(OSError):
        is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@contextmanager
def connections_unpaced() -> Iterator[None]:
    """The same for connections that a library makes meanwhile and does not show (gloo)."""
    before = set(_files())
    yield
    for number in set(_files()) - before:
        with suppress(OSError):  # it may be closed by now
            if S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    unpace(connection)


def _files() -> list[int]:
    listed = os.listdir("/proc/self/fd")
    return [int(name) for name in listed if os.path.lexists(f"/proc/self/fd/{name}")]  # the listing had a file itself
