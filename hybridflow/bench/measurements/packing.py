"""Micro-batches under a token budget, and balance over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from hybridflow.bench.measurements.base import PROCESSES, Place, interleaved, loop, measurement
from hybridflow.bench.result import Metric, Reference
from hybridflow.data.packing import balance, pack

BUDGET = 16384


@measurement("packing", "micro", processes=PROCESSES)
def packing(place: Place) -> Iterator[Metric]:
    """micro-batches of 512 sequences and balance of 8,192 over 64 ranks: seconds, and how even they are"""
    random = np.random.default_rng(13)
    few, many = (np.clip(random.lognormal(m, s, n), 32, BUDGET).astype(np.int64)
                 for m, s, n in ((8.0, 0.6, 512), (7.2, 0.8, 8192)))  # fmt: skip
    found = interleaved(
        {"pack": lambda: [pack(few, BUDGET) for _ in range(4)], "balance": lambda: balance(many, 64), "loop": loop},
        clock=time.process_time,
    )
    loops = Reference("Python's own loop", tuple(found["loop"]))
    yield Metric("packing", "packing/4 times", "s", "lower", tuple(found["pack"]), yardstick=loops, bound=0.08)
    yield Metric("packing", "balance/64 ranks", "s", "lower", tuple(found["balance"]), yardstick=loops, bound=0.08)
    count = float(len(pack(few, BUDGET)))
    least = Reference("tokens over the budget", (float(math.ceil(int(few.sum()) / BUDGET)),))
    yield Metric("packing", "packing/micro-batches", "count", "lower", (count,), least, bound=0.01)
    sums = [int(many[np.asarray(group)].sum()) for group in balance(many, 64)]
    largest = max(sums) / (sum(sums) / len(sums))
    even = Reference("an even share", (1.0,))
    yield Metric("packing", "balance/largest over mean", "count", "lower", (largest,), even, bound=0.005)
