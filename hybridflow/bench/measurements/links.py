"""Links: what a node sends to its neighbours, all nodes at the same time; alone, what loopback carries."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

from hybridflow.bench.measurements.base import Place, measurement, rates
from hybridflow.bench.result import Metric, Reference
from hybridflow.errors import ResourceError
from hybridflow.launch import records
from hybridflow.launch.preflight import node_address
from hybridflow.process.secret import read_exactly

BYTES, CHUNK = 32 << 20, 1 << 20
ROUNDS, NEIGHBOURS = 15, 3
_DEADLINE_S = 30.0


@measurement("links", "preflight", per_node=True)
def links(place: Place) -> Iterator[Metric]:
    """bandwidth over TCP from each node to its neighbours"""
    address = "127.0.0.1" if len(place.nodes) == 1 else node_address(place.node, None)
    with socket.create_server((address, 0)) as server, socket.create_server(("127.0.0.1", 0)) as loopback:
        for listener in (server, loopback):
            threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        where = place.folder / "links"
        records.write(where / f"{place.node or 'node'}.json", {"address": address, "port": server.getsockname()[1]})
        if len(place.nodes) == 1:
            seconds = [_send(("127.0.0.1", loopback.getsockname()[1])) for _ in range(ROUNDS + 1)][1:]
            yield Metric("links", "links/loopback", "GB/s", "none", rates(BYTES / 1e9, seconds))
            return
        place.meet("links-open")
        own = place.nodes.index(place.node)
        for step in range(1, min(len(place.nodes) - 1, NEIGHBOURS) + 1):
            other = place.nodes[(own + step) % len(place.nodes)]
            found = json.loads((where / f"{other}.json").read_text(encoding="utf-8"))
            place.meet(f"links-{step}")
            sent, local = [], []
            for _ in range(ROUNDS + 1):
                sent.append(_send((found["address"], int(found["port"])), other))
                local.append(_send(("127.0.0.1", loopback.getsockname()[1])))
            limit = Reference("loopback", rates(BYTES / 1e9, local[1:]))
            yield Metric("links", f"links/to neighbour {step}", "GB/s", "higher", rates(BYTES / 1e9, sent[1:]), limit,
                         bound=0.2)  # fmt: skip
        place.meet("links-done")  # others may still be sending to this node


def _serve(listener: socket.socket) -> None:
    """Read what comes over one connection after the other, and answer each with one byte."""
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
            while left > 0 and (count := connection.recv_into(buffer, min(CHUNK, left))):
                left -= count
            connection.sendall(b"x")
        except OSError:
            return


def _send(address: tuple[str, int], node: str = "this node") -> float:
    """Seconds until the other end has read everything."""
    try:
        with socket.create_connection(address, timeout=_DEADLINE_S) as connection:
            chunk = bytes(CHUNK)
            start = time.perf_counter()
            for _ in range(BYTES // CHUNK):
                connection.sendall(chunk)
            read_exactly(connection, 1)
            return time.perf_counter() - start
    except (OSError, EOFError) as error:
        raise ResourceError(f"{node} at {address[0]}:{address[1]} does not take data ({error})") from error
