"""Requires the engine's key on SGLang's health, readiness and metrics paths too. Part of the
plugin, in the server's process.

SGLang exempts them for orchestrators' probes (sglang/srt/utils/auth.py:101), and `/health_generate`
makes the engine compute a token for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPEN = ("/health", "/ready", "/metrics")


def close_paths() -> None:
    """Make the server require the key on every path."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.auth.decide_request_auth", as_any_path, HookType.AROUND)


def as_any_path(original: Callable[..., Any], *, path: str, **asked: Any) -> Any:
    """Apply SGLang's decision for a path without an exemption."""
    return original(path="/" if path.startswith(_OPEN) else path, **asked)
