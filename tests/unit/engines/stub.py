"""An engine's HTTP server that answers as it is told."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

KEY = "key of the stub"


def answer_of(
    tokens: list[int], finish_reason: Any = "stop", log_probs: Any = None, **meta: Any
) -> dict[str, Any]:
    """One event of a response; with a finish reason the last one."""
    values = np.full(len(tokens), -0.5) if log_probs is None else np.array(log_probs)
    reason = {"type": finish_reason} if isinstance(finish_reason, str) else finish_reason
    packed = base64.b64encode(values.astype(np.float32).tobytes()).decode()
    known = {"finish_reason": reason, "packed_log_probs": packed, "weight_version": "3"}
    return {"output_ids": tokens, "meta_info": known | meta}


class Stub(ThreadingHTTPServer):
    """Answers each path with (status, body, delay in seconds) and remembers what it was asked. A
    list is streamed: an event each, for the prompts of a request in turn unless `meta_info` has the
    id of another. A function is called with the names of the prompts, and what it yields is sent at
    once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, Any, float]] = {}
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answers_with(self, path: str, body: Any, status: int = 200, delay_s: float = 0.0) -> None:
        self.answers[path] = (status, body, delay_s)


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        status, answer, delay_s = self.server.answers[self.path]
        self.server.closing.wait(delay_s)
        if callable(answer):
            self.send_response(status)
            self.end_headers()
            for events in answer(body["rid"]):
                self.wfile.write(events)
            return
        encoded = (
            streamed(answer, body["rid"])
            if self.path == "/generate" and isinstance(answer, list)
            else answer
        )
        encoded = encoded if isinstance(encoded, bytes) else json.dumps(encoded).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def streamed(events: list[Any], names: list[str], is_end: bool = True) -> bytes:
    """Server-sent events; `number` of an event's meta_info says whose it is."""
    lines: list[Any] = []
    for place, event in enumerate(events):
        if isinstance(event, dict) and "meta_info" in event:
            number = event["meta_info"].get("number", place)
            meta = {
                "id": names[number] if number < len(names) else "nobody's",
                **event["meta_info"],
            }
            lines.append({**event, "meta_info": meta})
        else:
            lines.append(event)
    sent = [b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines]
    return b"".join([*sent, b"data: [DONE]\n\n"] if is_end else sent)
