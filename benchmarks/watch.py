"""Measures the index of `hybridflow watch`: reading all dumps of a run, and searches over them."""

from __future__ import annotations

import random
import time
from functools import partial

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import Timed, interleaved, loops
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.watch.index import SampleIndex
from hybridflow.observe.watch.query import Query, ordered, search

STEPS = 300
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_S = 1.0
# a text that is nowhere scans everything
SEARCHES = {
    "text nowhere": {"text": "no such word"},
    "text everywhere": {"text": "answer"},
    "text and filters": {"text": "answer 7", "max_score": "0.5", "order": "longest"},
    "filters": {"group": "mixed", "finish": "length", "order": "best score"},
}


@measurement("watch", timeout_s=900, rounds=5)
def watch(place: Place, samples: int = 75_000, characters: int = 4_000) -> Yields:
    """seconds of a search over all samples of a run in the live page, and of reading its dumps"""
    run = place.local / "run"
    rows = samples // STEPS
    for step in range(1, STEPS + 1):
        _write(run, step, rows, characters)
    index = SampleIndex(run)
    began = time.perf_counter()
    read = len(list(index.refresh()))
    took = time.perf_counter() - began
    if read != STEPS or len(index.samples) != rows * STEPS:
        raise RuntimeError(f"{len(index.samples)} samples of {read} dumps were read")
    calls = {}
    for name, fields in SEARCHES.items():
        calls[f"watch/{name}"] = partial(_search, index, Query.parse(fields)[0])
    yield Timed(calls, yardstick=loops(20), bound=0.2)
    once = interleaved(calls, rounds=1, warm_up=0)
    slowest = max(map(max, once.values()))
    yield measured("watch/slowest search", "s", slowest, "lower", limit=("aim", MOST_S))
    yield measured("watch/read all dumps", "s", took, "lower")


def _search(index: SampleIndex, query: Query) -> None:
    found = index.samples
    ordered(found, search(index, found, query), query.order)


def _write(run: object, step: int, rows: int, characters: int) -> None:
    rng = random.Random(step)
    words = ["".join(rng.choices(LETTERS, k=6)) for _ in range(500)]
    texts = [" ".join(rng.choices(words, k=characters // 7)) for _ in range(8)]
    dump_rollouts(
        dump_path(f"{run}/rollouts", step),
        {
            "step": [step] * rows,
            "uid": [row // 8 for row in range(rows)],
            "data_source": ["math"] * rows,
            "finish_reason": [rng.choice(["stop", "length"]) for _ in range(rows)],
            "prompt_text": [
                f"prompt {row // 8}: {texts[row // 8 % 8][:400]}" for row in range(rows)
            ],
            "response_text": [f"answer {row}: {texts[row % 8]}" for row in range(rows)],
            "score": [float(rng.random() < 0.5) for _ in range(rows)],
            "response_length": [rng.randrange(1000) for _ in range(rows)],
        },
    )
