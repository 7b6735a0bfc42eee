"""No path of SGLang's is open without the engine's key."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from sglang.srt import runtime_context
from sglang.srt.utils import auth, common
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from hybridflow.engines.sglang.server_changes import as_any_path, probed_by_key

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


def test_the_server_of_a_further_node_asks_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process its paths ask by SGLang's own decision once more, as no hooks are applied."""
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "serve", lambda server: serve(server, served))
    monkeypatch.setattr(
        runtime_context, "get_serving", lambda: SimpleNamespace(api_key="right"), raising=True
    )
    monkeypatch.setattr(auth, "decide_request_auth", partial(as_any_path, decide_request_auth))
    probed_by_key(common.launch_dummy_health_check_server, "127.0.0.1", 1, False)
    deadline = time.monotonic() + 10
    while not served:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client = TestClient(served[0])
    for path in ("/ping", "/health", "/health_generate"):
        assert client.get(path).status_code == 401
        shown = {"Authorization": "Bearer wrong"}
        assert client.get(path, headers=shown).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer right"}).status_code == 200


async def serve(server: Any, served: list[Any]) -> None:
    served.append(server.config.app)
