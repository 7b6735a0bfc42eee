"""Requests that are under way in an engine when a test does something to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import Completion
from hybridflow.engines.sglang.engine import EngineClient
from hybridflow.engines.token_stream import Asked

PATIENCE_S = 240.0


@contextmanager
def generating(
    client: EngineClient, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[Future[list[Completion]]]:
    """A call to `generate` of which every prompt has its first token and none is at its end."""
    asked: list[Asked] = []
    ask = client.tokens.ask

    def noted(one: Asked) -> None:
        asked.append(one)
        ask(one)

    client.tokens.ask = noted  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.generate, prompts, SamplingConfig(), max_new_tokens)
            deadline = time.monotonic() + PATIENCE_S
            while not (asked and all(map(len, asked[0].answers))):
                assert time.monotonic() < deadline, "not every prompt has a token"
                time.sleep(0.005)
            yield running
    finally:
        client.tokens.ask = ask  # type: ignore[method-assign]
