"""Weights on the wire: the transport `tcp` between two threads beside a bare socket with the same messages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from hybridflow.bench.measurements.base import Place, interleaved, measurement, rates
from hybridflow.bench.result import Metric, Reference

MESSAGE, MESSAGES = 1 << 20, 48


@measurement("transports", "micro")
def transports(place: Place) -> Iterator[Metric]:
    """messages of 1 MiB over the transport tcp beside a bare socket"""
    import torch

    from hybridflow.process.rendezvous import master_store
    from hybridflow.process.secret import VARIABLE, job_secret
    from hybridflow.sync.payload import Payload
    from hybridflow.sync.transports import tcp
    from hybridflow.sync.transports.base import LAST_TAG, Endpoint

    os.environ.setdefault(VARIABLE, job_secret())
    store = master_store("127.0.0.1", 0, 30)
    endpoint = Endpoint("tcp", "bench", "127.0.0.1", store.port, (0,), (0,), MESSAGE, 30.0)
    cpu = torch.device("cpu")
    ends: dict[str, Any] = {}
    opening = threading.Thread(target=lambda: ends.update(receiver=tcp.open_receiver(endpoint, 0, cpu)))
    opening.start()
    sender = tcp.open_sender(endpoint, 0, cpu)
    opening.join(30)
    receiver = ends["receiver"]
    source, target = (Payload(torch.zeros(MESSAGE, dtype=torch.uint8)) for _ in range(2))

    def receive() -> None:
        for tag in (*range(MESSAGES - 1), LAST_TAG):
            receiver.receive(0, tag, target).wait()

    def stream() -> None:
        reader = threading.Thread(target=receive)
        reader.start()
        works = [sender.send(0, tag, source) for tag in (*range(MESSAGES - 1), LAST_TAG)]
        for work in works:
            work.wait()
        reader.join()

    near, far = socket.socketpair()
    found = interleaved({"tcp": stream, "bare": lambda: _bare(near, far)}, warm_up=2)
    for end in (sender, receiver, near, far):
        end.close()
    total = MESSAGE * MESSAGES / 1e9
    limit = Reference("a bare socket", rates(total, found["bare"]))
    yield Metric("transports", "transports/tcp", "GB/s", "higher", rates(total, found["tcp"]), limit, bound=0.1)


def _bare(near: socket.socket, far: socket.socket) -> None:
    chunk, buffer = bytes(MESSAGE), bytearray(MESSAGE)

    def read() -> None:
        for _ in range(MESSAGES):
            far.recv_into(buffer, MESSAGE, socket.MSG_WAITALL)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(MESSAGES):
        near.sendall(chunk)
    reader.join()
