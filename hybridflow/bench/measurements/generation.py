"""Measures an engine's throughput for several concurrencies and lengths, with and without its
prefix cache, and for lengths with a long tail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.training import MODEL
from hybridflow.bench.rounds import Call, Timed, loops

PROMPT = 64
CASES = {
    "1 request x 32": [32],
    "16 x 32": [32] * 16,
    "64 x 32": [32] * 64,
    "16 x 128": [128] * 16,
}
# lengths typical of reasoning, close to log-normal: the longest eighth has 44% of the tokens
TAIL = [12, 16, 20, 24, 28, 32, 32, 36, 40, 48, 56, 64, 80, 112, 176, 300]


@measurement("generation", "rollout", timeout_s=400, rounds=6)
def generation(place: Place) -> Yields:
    """tokens per second of an engine with a small dense model: by concurrency and length, with a
    prefix cache, and with a long tail"""
    from hybridflow.config.schema import RolloutConfig, SamplingConfig
    from hybridflow.engines.base import ENGINES
    from hybridflow.engines.spec import EngineSpec

    folder = place.local / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    spec = EngineSpec(name="bench", model_path=str(folder), dtype="float32")
    random = np.random.default_rng(1)
    engine = ENGINES.get(RolloutConfig().engine)(
        spec, place.local / "engine.log", lambda: None
    )

    def prompt(tokens: int = PROMPT) -> Any:
        return random.integers(2, 1000, tokens).tolist()

    def generate(lengths: Sequence[int]) -> None:
        engine.generate([prompt() for _ in lengths], SamplingConfig(), max(lengths))

    def tail() -> None:
        """Submit one request for each of the lengths and wait for all of them."""
        with ThreadPoolExecutor(len(TAIL)) as pool:
            list(pool.map(lambda length: generate([length]), TAIL))

    def first_token(prefix: Sequence[int]) -> None:
        engine.generate([prefix] * 16, SamplingConfig(), 1)

    engine.start()
    try:
        engine.wait_ready()
        for name, lengths in CASES.items():
            yield _rate(name, lengths, partial(generate, lengths))
        yield _rate("long tail", TAIL, tail)
        cached = prompt(8 * PROMPT)
        firsts = {
            "rollout/16 x 1, cached prefix": lambda: first_token(cached),
            "rollout/16 x 1, new prefix": lambda: first_token(prompt(8 * PROMPT)),
        }
        yield Timed(firsts, yardstick=loops(20), bound=0.25)
    finally:
        engine.stop()


def _rate(name: str, lengths: Sequence[int], call: Call) -> Timed:
    calls = {f"rollout/{name}": call}
    tokens = sum(lengths)
    return Timed(calls, yardstick=loops(20), amount=tokens, unit="tokens/s", bound=0.25)
