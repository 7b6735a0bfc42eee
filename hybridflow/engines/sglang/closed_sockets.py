"""Protection of the communication between SGLang's processes. Part of the plugin; runs in every
process.

SGLang unpickles messages from its ZeroMQ sockets (sglang/srt/managers/io_struct.py:2742) and
collectives. Its sockets are files in the engine's private folder, except with data-parallel
attention, on several nodes, and for broadcasts in a tensor-parallel group. Those use TCP ports
that anyone on the machine can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from hybridflow.process.rendezvous import client_store
from hybridflow.process.secret import digest
from hybridflow.process.signed_objects import sign_objects

SCHEME = "hybridflow"  # of the rendezvous address of an engine over several nodes


def close_sockets() -> None:
    """Encrypt all ZeroMQ sockets on TCP with CURVE, sign torch's object collectives, and use the
    job's store for the ranks' rendezvous."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from torch.distributed import register_rendezvous_handler

    HookRegistry.register("zmq.Socket.bind", bind, HookType.AROUND)
    HookRegistry.register("zmq.Socket.connect", connect, HookType.AROUND)
    sign_objects()
    register_rendezvous_handler(SCHEME, meet)


def keys() -> tuple[bytes, bytes]:
    """Return the public and the secret key shared by all of the job's sockets.

    Both are kept secret: CurveZMQ never transmits the public key of the listening socket, and no
    client can connect without that key.
    """
    import zmq
    from zmq.utils import z85

    secret = z85.encode(digest("curve"))
    return zmq.curve_public(secret), secret


def bind(original: Callable[..., Any], socket: Any, address: str, *args: Any, **kwargs: Any) -> Any:
    """Bind the socket, using CURVE on TCP addresses."""
    if address.startswith("tcp:"):
        socket.curve_publickey, socket.curve_secretkey = keys()
        socket.curve_server = True
    return original(socket, address, *args, **kwargs)


def connect(
    original: Callable[..., Any], socket: Any, address: str, *args: Any, **kwargs: Any
) -> Any:
    """Connect the socket, using CURVE on TCP addresses."""
    if address.startswith("tcp:"):
        public, secret = keys()
        socket.curve_publickey = public
        socket.curve_secretkey = secret
        socket.curve_serverkey = public
    return original(socket, address, *args, **kwargs)


def meet(
    url: str, timeout: timedelta = timedelta(minutes=10), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Handle torch's rendezvous for hybridflow://HOST:PORT?rank=R&world_size=N."""
    from urllib.parse import parse_qs, urlparse

    from hybridflow.process.torch_store import TorchStore

    at = urlparse(url)
    asked = parse_qs(at.query)
    client = client_store(str(at.hostname), int(at.port or 0), timeout.total_seconds())
    yield TorchStore(client), int(asked["rank"][0]), int(asked["world_size"][0])
