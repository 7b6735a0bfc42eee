"""The load of an engine: from its requests, and from the server's own metrics."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hybridflow.engines.base import Load
from hybridflow.engines.sglang.engine import EngineClient
from hybridflow.engines.supervisor import BusyClock, LoadWatch
from hybridflow.errors import EngineError
from hybridflow.rollout.service import over_engines


def test_the_clock_counts_the_time_with_requests() -> None:
    now = [10.0]
    clock = BusyClock(lambda: now[0])

    def at(seconds: float, has_requests: bool, tokens: int = 0) -> None:
        now[0] = seconds
        clock.tokens += tokens
        clock.note(has_requests)

    at(12, True)
    at(13, True, 30)  # another request
    at(16, False, 50)
    now[0] = 20
    assert clock.take() == {"tokens_per_s": 80 / 4, "idle_share": 0.6}
    at(22, True)
    now[0] = 24
    # requests that go on count on both sides of a reading
    assert clock.take() == {"tokens_per_s": 0.0, "idle_share": 0.5} and clock.is_busy
    at(26, False, 10)
    assert clock.take() == {"tokens_per_s": 5.0, "idle_share": 0.0}
    assert clock.take() == {}  # no time has passed


def test_the_watch_reads_while_there_are_requests() -> None:
    readings = iter([Load(4, 2, 0.5), None, Load(8, 0, 0.25)])
    clock = BusyClock()
    done = threading.Event()

    def load() -> Load | None:
        found = next(readings, None)
        if found == Load(8, 0, 0.25):
            clock.note(False)
            done.set()
        return found

    watch = LoadWatch(load, clock)
    time.sleep(0.3)
    assert watch.take() == {}
    clock.note(True)
    assert done.wait(10)
    time.sleep(0.1)
    assert watch.take() == {
        "running/mean": 6.0,
        "queue/mean": 1.0,
        "queue/max": 2.0,
        "kv_use/mean": 0.375,
        "kv_use/max": 0.5,
    }


def test_engines_are_averaged_and_their_maxima_compared() -> None:
    found = over_engines([{"queue/max": 3.0, "idle_share": 0.5}, {"queue/max": 5.0}, {}])
    assert found == {"engine/queue/max": 5.0, "engine/idle_share": 0.5}
    assert over_engines([]) == {}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            {"loads": [(3, 1, 0.5), (1, 0, 0.25)]},
            Load(4, 1, 0.375),
        ),
        ({"loads": []}, None),
        ({"detail": "not found"}, None),
    ],
)
def test_the_answer_of_an_sglang_server(answer: dict[str, Any], found: Load | None) -> None:
    names = ("num_running_reqs", "num_waiting_reqs", "token_usage")
    if "loads" in answer:
        answer = {"loads": [dict(zip(names, row, strict=True)) for row in answer["loads"]]}
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", "key")
    if found is None:
        with pytest.raises(EngineError, match="/v1/loads"):
            client.load()
    else:
        assert client.load() == found
    assert asked == [("/v1/loads?include=core", "Bearer key")]
    client.close()
    server.shutdown()
    server.server_close()
