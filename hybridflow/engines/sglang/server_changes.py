"""HybridFlow's changes to all of SGLang's own processes, applied by the plugin: keys on every path,
encrypted sockets, and packed answers.

Paths: SGLang exempts its health, readiness and metrics paths from authentication for orchestrators'
probes (sglang/srt/utils/auth.py:101), and each request to `/health_generate` makes the engine
compute a token. An engine's additional nodes run a server for such probes only, which requires no
key (sglang/srt/utils/common.py:3624).

Sockets: SGLang unpickles messages from its ZeroMQ sockets (sglang/srt/managers/io_struct.py:2742)
and collectives. Its sockets are files in the engine's private folder, except with data-parallel
attention, on several nodes, and for broadcasts in a tensor-parallel group. Those use TCP ports that
anyone on the machine can reach.

Answers: SGLang sends a list [log-prob, token, text] for each token
(sglang/srt/managers/tokenizer_manager.py:2860), about 30 bytes of JSON and five Python objects.
Packed, each token takes four bytes before base64 encoding.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np

from hybridflow.process.rendezvous import client_store
from hybridflow.process.secret import digest
from hybridflow.process.signed_objects import sign_objects

_OPEN = ("/health", "/ready", "/metrics")
SCHEME = "hybridflow"  # of the rendezvous address of an engine over several nodes
# in meta_info, base64 each: float32 log-prob of each output id; int32 size of each token's support;
# int32 ids of the supports' tokens
LOG_PROBS = "packed_log_probs"
SUPPORT_SIZES = "packed_support_sizes"
SUPPORT_IDS = "packed_support_ids"
_LISTED = "output_token_logprobs"
_SUPPORT = "output_token_sampling_mask"
_AMONG = "output_token_sampling_logprobs"


def close_paths() -> None:
    """Patch SGLang's servers to require the key on every path."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.auth.decide_request_auth", as_any_path, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.utils.common.launch_dummy_health_check_server", probed_by_key, HookType.AROUND
    )


def as_any_path(original: Callable[..., Any], *, path: str, **asked: Any) -> Any:
    """Authenticate a request to an exempted path like a request to any other path."""
    return original(path="/" if path.startswith(_OPEN) else path, **asked)


def probed_by_key(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start the probe server of an additional node with an application that requires the
    engine's key."""
    import fastapi
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import add_api_key_middleware

    key = get_serving().api_key

    class Application(fastapi.FastAPI):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            add_api_key_middleware(self, api_key=key, admin_api_key=key)

    plain = fastapi.FastAPI
    fastapi.FastAPI = Application  # type: ignore[misc]  # SGLang creates its application now
    try:
        return original(*args, **kwargs)
    finally:
        fastapi.FastAPI = plain  # type: ignore[misc]


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


def pack_answers() -> None:
    """Patch the server to pack the responses that it streams."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response"
    HookRegistry.register(target, packed, HookType.AROUND)


async def packed(
    original: Callable[..., AsyncIterator[dict[str, Any]]],
    manager: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of one response with packed log-probs. Routed experts are sent only with the
    last event."""
    async for event in original(manager, request, *args, **kwargs):
        meta = event.get("meta_info", {})
        if getattr(request, "stream", False) and _LISTED in meta:
            pack(meta)
        yield event


def pack(meta: dict[str, Any]) -> None:
    """Replace the lists of log-probs with `LOG_PROBS`. If supports are requested, the log-probs are
    normalised over them."""
    values = [entry[0] for entry in meta.pop(_LISTED)]
    if (supports := meta.pop(_SUPPORT, None)) is not None:
        values = meta.pop(_AMONG)
        meta[SUPPORT_SIZES] = _encoded(list(map(len, supports)), np.int32)
        meta[SUPPORT_IDS] = _encoded(list(chain.from_iterable(supports)), np.int32)
    meta[LOG_PROBS] = _encoded(values, np.float32)
    meta.pop("input_token_logprobs", None)
    if meta["finish_reason"] is None:
        meta.pop("routed_experts", None)


def _encoded(values: Sequence[Any], kind: type) -> str:
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()
