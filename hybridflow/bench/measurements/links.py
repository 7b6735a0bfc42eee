"""Measures the bandwidth from each node to its neighbours while all nodes send at the same time. A
single node uses loopback."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from hybridflow.bench.measurements.base import Place, Yields, measurement
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
def links(place: Place) -> Yields:
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


def _listen(stack: ExitStack, address: str) -> Any:
    """Accept connections until the stack is closed. Returns the address and port."""
    server = stack.enter_context(_Server((address, 0), _Reader))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return server.server_address


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


class _Reader(socketserver.StreamRequestHandler):
    """Reads a connection to the end, and then replies with one byte."""

    timeout = _DEADLINE_S

    def handle(self) -> None:
        buffer = bytearray(CHUNK)
        left = BYTES
        with suppress(OSError):
            while left > 0 and (
                count := self.connection.recv_into(buffer, min(CHUNK, left))
            ):
                left -= count
            self.connection.sendall(b"x")


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
