"""An engine's tokens a second: by concurrency and length, with and without its prefix cache, and with a long tail."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from hybridflow.bench.measurements.base import Place, loop, measurement, rates
from hybridflow.bench.measurements.training import MODEL
from hybridflow.bench.result import Metric, Reference

ROUNDS = 6
CASES = {"1 request x 32": [32], "16 x 32": [32] * 16, "64 x 32": [32] * 64, "16 x 128": [128] * 16}
PROMPT = 64
TAIL = [12, 16, 20, 24, 28, 32, 32, 36, 40, 48, 56, 64, 80, 112, 176, 300]  # the longest eighth has 44% of the tokens


@measurement("generation", "rollout", timeout_s=400)
def generation(place: Place) -> Iterator[Metric]:
    """an engine with a small dense model: tokens a second by concurrency and length, prefix cache, long tail"""
    from hybridflow.config.schema import RolloutConfig, SamplingConfig
    from hybridflow.engines.base import ENGINES
    from hybridflow.engines.spec import EngineSpec

    folder = place.local / "model"
    folder.mkdir()
    config = {**MODEL, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = EngineSpec(name="bench", model_path=str(folder), dtype="float32")
    random = np.random.default_rng(1)
    engine = ENGINES.get(RolloutConfig().engine)(spec, place.local / "engine.log", lambda: None)
    engine.start()
    try:
        engine.wait_ready()

        def generate(lengths: Sequence[int], prompts: Sequence[Sequence[int]] | None = None) -> float:
            """Seconds until all of these lengths are there; each prompt is new unless it is given."""
            fresh = prompts or [random.integers(2, 1000, PROMPT).tolist() for _ in lengths]
            start = time.perf_counter()
            engine.generate(fresh, SamplingConfig(), max(lengths))
            return time.perf_counter() - start

        def tail() -> float:
            """Lengths as reasoning has them, near log-normal: a request of each length, all at the same time."""
            with ThreadPoolExecutor(len(TAIL)) as pool:
                return max(pool.map(lambda length: generate([length]), TAIL))

        for name, lengths in CASES.items():
            seconds, loops = _rounds(partial(generate, lengths))
            yield _tokens_a_second(name, sum(lengths), seconds, loops)
        yield _tokens_a_second("long tail", sum(TAIL), *_rounds(tail))
        prefix = random.integers(2, 1000, 8 * PROMPT).tolist()

        def first_token(cached: bool) -> float:
            return generate([1] * 16, [prefix if cached else random.integers(2, 1000, 8 * PROMPT).tolist()] * 16)

        for name, cached in (("cached prefix", True), ("new prefix", False)):
            seconds, loops = _rounds(partial(first_token, cached))
            yield Metric("generation", f"rollout/16 x 1, {name}", "s", "lower", tuple(seconds),
                         yardstick=Reference("Python's own loops", tuple(loops)), bound=0.25)  # fmt: skip
    finally:
        engine.stop()


def _tokens_a_second(name: str, tokens: int, seconds: Sequence[float], loops: Sequence[float]) -> Metric:
    yardstick = Reference("Python's own loops", rates(tokens, loops))
    rate = rates(tokens, seconds)
    return Metric("generation", f"rollout/{name}", "tokens/s", "higher", rate, yardstick=yardstick, bound=0.25)


def _rounds(job: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Seconds of the job and of the yardstick in each round; the first round warms up."""
    seconds: list[float] = []
    loops: list[float] = []
    for turn in range(ROUNDS + 1):
        took, start = job(), time.perf_counter()
        for _ in range(20):
            loop()
        if turn:
            seconds.append(took)
            loops.append(time.perf_counter() - start)
    return seconds, loops
