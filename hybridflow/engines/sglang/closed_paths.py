"""SGLang's health, readiness and metrics ask for the engine's key like every other path. Part of
the plugin, in the server's process.

SGLang lets everybody in there, for probes of orchestrators (sglang/srt/utils/auth.py:101), and
`/health_generate` has the engine compute a token for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPEN = ("/health", "/ready", "/metrics")


def close_paths() -> None:
    """Have the server ask for the key on every path."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.auth.decide_request_auth", as_any_path, HookType.AROUND)


def as_any_path(original: Callable[..., Any], *, path: str, **asked: Any) -> Any:
    """SGLang's decision, made for a path that it knows no exception for."""
    return original(path="/" if path.startswith(_OPEN) else path, **asked)
