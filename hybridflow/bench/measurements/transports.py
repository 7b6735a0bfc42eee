"""Measures the transport `tcp` between two threads, compared with a bare socket that sends the same
messages."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.rounds import Side, Timed, repeated

MESSAGE = 1 << 20
MESSAGES = 48


@measurement("transports", "micro", warm_up=2)
def transports(place: Place) -> Yields:
    """1 MiB messages over the tcp transport, compared with a bare socket"""
    import torch

    from hybridflow.process.rendezvous import master_store
    from hybridflow.sync.transports import tcp
    from hybridflow.sync.transports.base import LAST_TAG, Endpoint, Payload

    store = master_store("127.0.0.1", 0, 30)
    endpoint = Endpoint(
        "tcp", "bench", "127.0.0.1", store.port, (0,), (0,), MESSAGE, 30.0
    )
    cpu = torch.device("cpu")
    sender, receiver = _together(
        lambda: tcp.open_sender(endpoint, 0, cpu),
        lambda: tcp.open_receiver(endpoint, 0, cpu),
    )
    source = Payload(torch.zeros(MESSAGE, dtype=torch.uint8))
    target = Payload(torch.zeros(MESSAGE, dtype=torch.uint8))
    tags = (*range(MESSAGES - 1), LAST_TAG)
    near, far = socket.socketpair()
    chunk = bytes(MESSAGE)
    buffer = bytearray(MESSAGE)

    def receive() -> None:
        for tag in tags:
            receiver.receive(0, tag, target).wait()

    def send() -> None:
        for work in [sender.send(0, tag, source) for tag in tags]:
            work.wait()

    def read() -> None:
        far.recv_into(buffer, MESSAGE, socket.MSG_WAITALL)

    def write() -> None:
        near.sendall(chunk)

    sockets = (repeated(write, MESSAGES), repeated(read, MESSAGES))
    limit = Side("a bare socket", lambda: _together(*sockets))
    calls = {"transports/tcp": lambda: _together(send, receive)}
    yield Timed(calls, limit, amount=MESSAGE * MESSAGES / 1e9, unit="GB/s", bound=0.1)
    for end in (sender, receiver, near, far):
        end.close()


def _together(own: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """Call `own` in this thread and `other` in a new one. Returns both results."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(other)
        return own(), result.result()
