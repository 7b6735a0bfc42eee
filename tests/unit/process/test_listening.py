"""Who listens at an address, by the kernel's own tables."""

from __future__ import annotations

import os
import socket

import pytest

from hybridflow.process.listening import listeners_at


@pytest.mark.parametrize(
    ("bound", "asked", "is_seen"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::", "127.0.0.1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
    ],
)
def test_this_user_is_seen_where_it_listens(bound: str, asked: str, is_seen: bool) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        port = listener.getsockname()[1]
        assert listeners_at(asked, port) == set()  # bound is not listening
        listener.listen()
        assert listeners_at(asked, port) == ({os.getuid()} if is_seen else set())
    assert listeners_at(asked, port) == set()
