"""Measures packing of micro-batches under a token budget, and balancing across ranks."""

from __future__ import annotations

import math

import numpy as np

from hybridflow.bench.measurements.base import PROCESSES, Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import Timed, loops, repeated
from hybridflow.data.packing import balance, pack

BUDGET = 16384
RANKS = 64


@measurement("packing", "micro", processes=PROCESSES, cpu_time=True)
def packing(place: Place) -> Yields:
    """packing of 512 sequences into micro-batches and balancing of 8,192 sequences across 64 ranks:
    duration and evenness"""
    random = np.random.default_rng(13)
    few = np.clip(random.lognormal(8.0, 0.6, 512), 32, BUDGET).astype(np.int64)
    many = np.clip(random.lognormal(7.2, 0.8, 8192), 32, BUDGET).astype(np.int64)
    calls = {
        "packing/4 times": repeated(lambda: pack(few, BUDGET), 4),
        "balance/64 ranks": lambda: balance(many, RANKS),
    }
    yield Timed(calls, yardstick=loops(1), bound=0.08)
    fewest = ("tokens over the budget", math.ceil(int(few.sum()) / BUDGET))
    count = len(pack(few, BUDGET))
    yield measured(
        "packing/micro-batches", "count", count, "lower", limit=fewest, bound=0.01
    )
    sums = [int(many[np.asarray(group)].sum()) for group in balance(many, RANKS)]
    largest = max(sums) / (sum(sums) / len(sums))
    even = ("an even share", 1.0)
    yield measured(
        "balance/largest over mean", "count", largest, "lower", limit=even, bound=0.005
    )
