"""Closes what SGLang's processes tell each other to whoever is not of the job. Part of the plugin,
in every process.

SGLang unpickles what comes over its ZeroMQ sockets (sglang/srt/managers/io_struct.py:2742) and over
collectives. Its sockets are files in the engine's private folder, except with data-parallel
attention, over several nodes, and where a tensor-parallel group broadcasts: there they are TCP
ports that anybody on the machine reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from hybridflow.process.rendezvous import client_store
from hybridflow.process.secret import digest
from hybridflow.process.signed_objects import sign_objects

SCHEME = "hybridflow"  # of the address at which the ranks of an engine over several nodes meet


def close_sockets() -> None:
    """Have every ZeroMQ socket over TCP use CURVE, torch's object collectives sign, and ranks meet
    in the job's store."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from torch.distributed import register_rendezvous_handler

    HookRegistry.register("zmq.Socket.bind", bind, HookType.AROUND)
    HookRegistry.register("zmq.Socket.connect", connect, HookType.AROUND)
    sign_objects()
    register_rendezvous_handler(SCHEME, meet)


def keys() -> tuple[bytes, bytes]:
    """The public and the secret key of all sockets of the job. Both are kept: CurveZMQ never sends
    the public key of the end that listens, and nobody can greet it without."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(digest("curve"))
    return zmq.curve_public(secret), secret


def bind(original: Callable[..., Any], socket: Any, address: str, *args: Any, **kwargs: Any) -> Any:
    """Listen, with CURVE where the address is TCP."""
    if address.startswith("tcp:"):
        socket.curve_publickey, socket.curve_secretkey = keys()
        socket.curve_server = True
    return original(socket, address, *args, **kwargs)


def connect(
    original: Callable[..., Any], socket: Any, address: str, *args: Any, **kwargs: Any
) -> Any:
    """Connect, with CURVE where the address is TCP."""
    if address.startswith("tcp:"):
        public, secret = keys()
        socket.curve_publickey = public
        socket.curve_secretkey = secret
        socket.curve_serverkey = public
    return original(socket, address, *args, **kwargs)


def meet(
    url: str, timeout: timedelta = timedelta(minutes=10), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous handler for hybridflow://HOST:PORT?rank=R&world_size=N."""
    from urllib.parse import parse_qs, urlparse

    from hybridflow.process.torch_store import TorchStore

    at = urlparse(url)
    asked = parse_qs(at.query)
    client = client_store(str(at.hostname), int(at.port or 0), timeout.total_seconds())
    yield TorchStore(client), int(asked["rank"][0]), int(asked["world_size"][0])
