"""Measures the transport `tcp` between two threads, compared with a bare socket that sends the same
messages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.rounds import Call, Side, Timed

MESSAGE = 1 << 20
MESSAGES = 48


@measurement("transports", "micro", warm_up=2)
def transports(place: Place) -> Iterator[Timed]:
    """1 MiB messages over the tcp transport, compared with a bare socket"""
    import torch

    from hybridflow.process.rendezvous import master_store
    from hybridflow.process.secret import VARIABLE, job_secret
    from hybridflow.sync.transports import tcp
    from hybridflow.sync.transports.base import LAST_TAG, Endpoint, Payload

    os.environ.setdefault(VARIABLE, job_secret())
    store = master_store("127.0.0.1", 0, 30)
    endpoint = Endpoint(
        "tcp", "bench", "127.0.0.1", store.port, (0,), (0,), MESSAGE, 30.0
    )
    cpu = torch.device("cpu")
    ends: dict[str, Any] = {}
    opening = threading.Thread(
        target=lambda: ends.update(receiver=tcp.open_receiver(endpoint, 0, cpu))
    )
    opening.start()
    sender = tcp.open_sender(endpoint, 0, cpu)
    opening.join(30)
    receiver = ends["receiver"]
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
        for _ in tags:
            far.recv_into(buffer, MESSAGE, socket.MSG_WAITALL)

    def write() -> None:
        for _ in tags:
            near.sendall(chunk)

    limit = Side("a bare socket", lambda: _together(read, write))
    calls = {"transports/tcp": lambda: _together(receive, send)}
    yield Timed(calls, limit, amount=MESSAGE * MESSAGES / 1e9, unit="GB/s", bound=0.1)
    for end in (sender, receiver, near, far):
        end.close()


def _together(other: Call, own: Call) -> None:
    """Run `other` in a new thread and `own` in the current one."""
    thread = threading.Thread(target=other)
    thread.start()
    own()
    thread.join()
