"""Measures the index of `hybridflow watch`: reading all dumps of a run, and searches over them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, measured
from hybridflow.bench.rounds import Timed, loops
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


@measurement("watch", timeout_s=900, rounds=5, warm_up=1)
def watch(
    place: Place, samples: int = 75_000, characters: int = 4_000
) -> Iterator[Timed | Metric]:
    """seconds of a search over all samples of a run in the live page, and of reading its dumps"""
    run = place.local / "run"
    for step in range(1, STEPS + 1):
        _write(run, step, samples // STEPS, characters)
    index = SampleIndex(run)
    began = time.perf_counter()
    read = sum(1 for _ in index.refresh())
    took = time.perf_counter() - began
    found = index.samples
    if read != STEPS or len(found) != samples // STEPS * STEPS:
        raise RuntimeError(f"{len(found)} samples of {read} dumps were read")

    def one(query: Query) -> None:
        ordered(found, search(index, found, query), query.order)

    queries = {name: Query.parse(fields)[0] for name, fields in SEARCHES.items()}
    yield Timed(
        {
            f"watch/{name}": lambda query=query: one(query)
            for name, query in queries.items()
        },
        yardstick=loops(20),
        bound=0.2,
    )
    slowest = 0.0
    for query in queries.values():
        began = time.perf_counter()
        one(query)
        slowest = max(slowest, time.perf_counter() - began)
    yield measured("watch/slowest search", "s", slowest, "lower", limit=("aim", MOST_S))
    yield measured("watch/read all dumps", "s", took, "lower")


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
