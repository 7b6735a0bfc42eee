"""No path of SGLang's is open without the engine's key."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from hybridflow.engines.sglang.closed_paths import as_any_path

KEYS: dict[str, Any] = {
    "api_key": "right",
    "admin_api_key": "right",
    "auth_level": AuthLevel.NORMAL,
}


@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/ready", "/metrics", "/metrics/", "/generate"]
)
@pytest.mark.parametrize("shown", [None, "", "Bearer wrong", "right", "Bearer right"])
def test_each_path_asks_for_the_key(path: str, shown: str | None) -> None:
    answer = as_any_path(
        decide_request_auth, method="GET", path=path, authorization_header=shown, **KEYS
    )
    assert answer.allowed == (shown == "Bearer right")


def test_sglang_still_makes_the_exceptions_that_are_closed() -> None:
    for path in ("/health_generate", "/ready", "/metrics"):
        assert decide_request_auth(
            method="GET", path=path, authorization_header=None, **KEYS
        ).allowed
