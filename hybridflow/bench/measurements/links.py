"""Measures the bandwidth from each node to its neighbours while all nodes send at the same time. A
single node uses loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.rounds import Side, Timed
from hybridflow.errors import ResourceError
from hybridflow.launch import records
from hybridflow.launch.preflight import node_address
from hybridflow.process.secret import read_exactly

BYTES = 32 << 20
CHUNK = 1 << 20
NEIGHBOURS = 3
_DEADLINE_S = 30.0
_LOOPBACK = "127.0.0.1"


@measurement("links", "preflight", per_node=True, rounds=15)
def links(place: Place) -> Iterator[Timed]:
    """bandwidth over TCP from each node to its neighbours"""
    gigabytes = BYTES / 1e9
    with ExitStack() as stack:
        local = partial(_send, _listen(stack, _LOOPBACK), "this node")
        if len(place.nodes) == 1:
            calls = {"links/loopback": local}
            yield Timed(calls, amount=gigabytes, unit="GB/s", better="none")
            return
        where = place.folder / "links"
        own = _listen(stack, node_address(place.node, None))
        records.write(where / f"{place.node}.json", {"address": own})
        place.meet("links-open")
        for step in range(1, min(len(place.nodes) - 1, NEIGHBOURS) + 1):
            node = place.nodes[(place.rank + step) % len(place.nodes)]
            found = json.loads((where / f"{node}.json").read_text(encoding="utf-8"))
            place.meet(f"links-{step}")
            remote = partial(_send, tuple(found["address"]), node)
            calls = {f"links/to neighbour {step}": remote}
            limit = Side("loopback", local)
            yield Timed(calls, limit, amount=gigabytes, unit="GB/s", bound=0.2)
        place.meet("links-done")  # other nodes may still be sending to this one


def _listen(stack: ExitStack, address: str) -> tuple[str, int]:
    """Accept connections until the stack is closed. Returns the address and port."""
    listener = stack.enter_context(socket.create_server((address, 0)))
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    host, port = listener.getsockname()
    return host, port


def _serve(listener: socket.socket) -> None:
    """Accept connections. A separate thread reads each connection to the end and then replies with
    one byte.
    """
    buffer = bytearray(CHUNK)
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            reading = threading.Thread(
                target=_read, args=(connection, buffer), daemon=True
            )
            reading.start()


def _read(connection: socket.socket, buffer: bytearray) -> None:
    left = BYTES
    with connection, suppress(OSError):
        connection.settimeout(_DEADLINE_S)
        while left > 0:
            count = connection.recv_into(buffer, min(CHUNK, left))
            if count == 0:
                return
            left -= count
        connection.sendall(b"x")


def _send(address: tuple[str, int], node: str) -> None:
    """Send the data. Returns once the receiver has read everything."""
    chunk = bytes(CHUNK)
    try:
        with socket.create_connection(address, timeout=_DEADLINE_S) as connection:
            for _ in range(BYTES // CHUNK):
                connection.sendall(chunk)
            read_exactly(connection, 1)
    except (OSError, EOFError) as error:
        host, port = address
        raise ResourceError(
            f"could not send to {node} at {host}:{port} ({error})"
        ) from error
