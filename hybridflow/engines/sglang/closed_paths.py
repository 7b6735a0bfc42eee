"""Requires the engine's key on SGLang's health, readiness and metrics paths too. Part of the
plugin, in the server's process.

SGLang exempts them for orchestrators' probes (sglang/srt/utils/auth.py:101), and `/health_generate`
makes the engine compute a token for each request. The further nodes of an engine have a server for
such probes alone, which asks for no key at all (sglang/srt/utils/common.py:3624).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPEN = ("/health", "/ready", "/metrics")


def close_paths() -> None:
    """Make the servers require the key on every path."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.auth.decide_request_auth", as_any_path, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.utils.common.launch_dummy_health_check_server", probed_by_key, HookType.AROUND
    )


def as_any_path(original: Callable[..., Any], *, path: str, **asked: Any) -> Any:
    """Apply SGLang's decision for a path without an exemption."""
    return original(path="/" if path.startswith(_OPEN) else path, **asked)


def probed_by_key(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start the server of a further node, whose application asks for the engine's key."""
    import fastapi
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import add_api_key_middleware

    key = get_serving().api_key

    class Application(fastapi.FastAPI):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            add_api_key_middleware(self, api_key=key, admin_api_key=key)

    plain = fastapi.FastAPI
    fastapi.FastAPI = Application  # type: ignore[misc]  # SGLang makes its application meanwhile
    try:
        return original(*args, **kwargs)
    finally:
        fastapi.FastAPI = plain  # type: ignore[misc]
