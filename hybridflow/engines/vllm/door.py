"""Authentication for a vLLM server: every path requires the engine's key.

vLLM's own `--api-key` protects the paths under `/v1`, `/v2` and `/inference`, but not those that
change weights and memory (vllm/entrypoints/serve/middleware/authenticate.py:14). `Door` is passed
to vLLM as `--middleware`. Standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "HYBRIDFLOW_ENGINE_KEY"
_App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class Door:
    """An ASGI wrapper that responds with status 401 if the key is missing or wrong."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward an HTTP request if its key is correct. Web sockets are ignored."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if scope["type"] == "http" and hmac.compare_digest(shown, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "http":
            await send(
                {
                    "type": "http.response.start",
                    "status": 401,
                    "headers": [(b"content-length", b"0")],
                }
            )
            await send({"type": "http.response.body", "body": b""})
