"""Connections within a host are not paced, ours and a library's; everything else is left alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from hybridflow.sync.transports.pacing import connections_unpaced, unpace


def control(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0]


def test_within_a_host_both_ends_take_reno(listener: socket.socket) -> None:
    one, other = pair(listener)
    with one, other:
        for end in (one, other):
            unpace(end)
            assert control(end) == "reno"


def test_what_has_no_other_end_is_left_alone(listener: socket.socket) -> None:
    before = control(listener)
    unpace(listener)
    assert control(listener) == before


def test_connections_of_a_library_are_found_and_stay_open(listener: socket.socket) -> None:
    early, early_other = pair(listener)
    before, files = control(early), len(os.listdir("/proc/self/fd"))
    with connections_unpaced():
        one, other = pair(listener)
        pipe, datagrams = os.pipe(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    assert (control(one), control(other), control(early)) == ("reno", "reno", before)
    assert len(os.listdir("/proc/self/fd")) == files + 5
    one.sendall(b"still here")
    assert other.recv(10) == b"still here"
    for end in (early, early_other, one, other, datagrams):
        end.close()
    for number in pipe:
        os.close(number)
