"""Measures the bandwidth from each node to its neighbours while all nodes send at the same time. A
single node uses loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
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
    alone = len(place.nodes) == 1
    address = _LOOPBACK if alone else node_address(place.node, None)
    with (
        socket.create_server((address, 0)) as server,
        socket.create_server((_LOOPBACK, 0)) as loopback,
    ):
        for listener in (server, loopback):
            threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        local = partial(_send, _LOOPBACK, loopback.getsockname()[1], "this node")
        gigabytes = BYTES / 1e9
        if alone:
            yield Timed(
                {"links/loopback": local}, amount=gigabytes, unit="GB/s", better="none"
            )
            return
        where = place.folder / "links"
        own = {"address": address, "port": server.getsockname()[1]}
        records.write(where / f"{place.node}.json", own)
        place.meet("links-open")
        for step in range(1, min(len(place.nodes) - 1, NEIGHBOURS) + 1):
            index = (place.nodes.index(place.node) + step) % len(place.nodes)
            node = place.nodes[index]
            found = json.loads((where / f"{node}.json").read_text(encoding="utf-8"))
            place.meet(f"links-{step}")
            remote = partial(_send, found["address"], int(found["port"]), node)
            calls = {f"links/to neighbour {step}": remote}
            limit = Side("loopback", local)
            yield Timed(calls, limit, amount=gigabytes, unit="GB/s", bound=0.2)
        place.meet("links-done")  # other nodes may still be sending to this one


def _serve(listener: socket.socket) -> None:
    """Accept connections. A separate thread reads each connection to the end and then replies with
    one byte.
    """
    buffer = bytearray(CHUNK)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_read, args=(connection, buffer), daemon=True).start()


def _read(connection: socket.socket, buffer: bytearray) -> None:
    with connection:
        connection.settimeout(_DEADLINE_S)
        left = BYTES
        try:
            while left > 0 and (
                count := connection.recv_into(buffer, min(CHUNK, left))
            ):
                left -= count
            connection.sendall(b"x")
        except OSError:
            return


def _send(address: str, port: int, node: str) -> None:
    """Send the data. Returns once the receiver has read everything."""
    chunk = bytes(CHUNK)
    try:
        with socket.create_connection(
            (address, port), timeout=_DEADLINE_S
        ) as connection:
            for _ in range(BYTES // CHUNK):
                connection.sendall(chunk)
            read_exactly(connection, 1)
    except (OSError, EOFError) as error:
        raise ResourceError(
            f"could not send to {node} at {address}:{port} ({error})"
        ) from error
