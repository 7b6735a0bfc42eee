"""An engine's HTTP server that answers as it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "key of the stub"


def answer_of(tokens: list[int], **meta: Any) -> dict[str, Any]:
    log_probs = [[-0.5, token, None] for token in tokens]
    return {
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": log_probs,
            "finish_reason": {"type": "stop"},
            "weight_version": "3",
            **meta,
        },
    }


class Stub(ThreadingHTTPServer):
    """Answers each path with (status, body, delay in seconds) and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes, float]] = {}
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answers_with(self, path: str, body: Any, status: int = 200, delay_s: float = 0.0) -> None:
        self.answers[path] = (status, body if isinstance(body, bytes) else json.dumps(body).encode(), delay_s)


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        status, answer, delay_s = self.server.answers[self.path]
        self.server.closing.wait(delay_s)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
