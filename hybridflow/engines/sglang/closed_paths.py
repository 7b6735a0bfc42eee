"""Authentication for SGLang's health, readiness and metrics paths, which otherwise require no key.
Part of the plugin; runs in the server's process.

SGLang exempts them for orchestrators' probes (sglang/srt/utils/auth.py:101), and each request to
`/health_generate` makes the engine compute a token. An engine's additional nodes run a server for
such probes only, which requires no key (sglang/srt/utils/common.py:3624).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPEN = ("/health", "/ready", "/metrics")


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
