"""An engine's HTTP server that answers `/generate` at once with tokens made beforehand: streamed with packed
log-probabilities, or as one JSON answer, as asked. Run as a script it prints its port and serves until it is ended."""

from __future__ import annotations

import base64
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from aiohttp import web

EVENT_TOKENS = 256
VOCABULARY = 151_936


class Answers:
    """The encoded parts of one response of `length` tokens, the same for every prompt."""

    def __init__(self, length: int) -> None:
        random = np.random.default_rng(0)
        tokens, values = random.integers(0, VOCABULARY, length), -random.random(length, np.float32)
        self.events = []
        cuts = sorted({0, 1, *range(1, length, EVENT_TOKENS), length})
        for start, end in pairwise(cuts):
            packed = base64.b64encode(values[start:end].tobytes()).decode()
            reason = {"type": "length"} if end == length else None
            meta = {"packed_log_probs": packed, "finish_reason": reason, "weight_version": "1"}
            self.events.append(orjson.dumps({"output_ids": tokens[start:end].tolist(), "meta_info": meta}))
        listed = [[float(value), int(token), None] for value, token in zip(values, tokens, strict=True)]
        meta = {"output_token_logprobs": listed, "finish_reason": {"type": "length"}, "weight_version": "1"}
        self.whole = orjson.dumps({"output_ids": tokens.tolist(), "meta_info": meta})


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer each prompt of the request."""
    asked: dict[str, Any] = orjson.loads(await request.read())
    answers: Answers = request.app["answers"]
    if not asked.get("stream"):
        body = b"[" + b",".join([answers.whole] * len(asked["rid"])) + b"]"
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse()
    await response.prepare(request)
    names = [b'"meta_info":{"id":"' + name.encode() + b'",' for name in asked["rid"]]
    for event in answers.events:
        parts = [b"data: " + event.replace(b'"meta_info":{', name, 1) + b"\n\n" for name in names]
        await response.write(b"".join(parts))
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    """Serve answers of the length that is the first argument."""
    app = web.Application(client_max_size=1 << 30)
    app["answers"] = Answers(int(sys.argv[1]))
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)


if __name__ == "__main__":
    main()
