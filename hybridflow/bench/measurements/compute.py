"""How fast a node's cores and memory are, each by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS,
    ROUNDS_EACH,
    Place,
    interleaved,
    loop,
    measurement,
    rates,
)
from hybridflow.bench.result import Metric, Reference

SIZE = 768
COPY = 64 << 20


@measurement("compute", "preflight", "micro", per_node=True, processes=PROCESSES)
def compute(place: Place) -> Iterator[Metric]:
    """clocks of the cores (a matrix product, Python's own loop) and bandwidth of the memory"""
    left, right = (np.random.default_rng(seed).random((SIZE, SIZE), dtype=np.float32) for seed in (1, 2))
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    out = np.empty((SIZE, SIZE), np.float32)
    sides = {
        "product": lambda: np.matmul(left, right, out=out),
        "loop": loop,
        "copy": lambda: np.copyto(target, source),
    }
    rounds = ROUNDS_EACH if len(place.nodes) == 1 else ROUNDS
    found = {name: tuple(seconds) for name, seconds in interleaved(sides, rounds, warm_up=3).items()}
    yardstick = Reference("Python's own loop", found["loop"])
    yield Metric("compute", "compute/product", "s", "lower", found["product"], yardstick=yardstick, bound=0.08)
    yardstick = Reference("a matrix product", found["product"])
    yield Metric("compute", "compute/loop", "s", "lower", found["loop"], yardstick=yardstick, bound=0.08)
    yardstick = Reference("a matrix product", rates(2 * COPY / 1e9, found["product"]))
    rate = rates(2 * COPY / 1e9, found["copy"])
    yield Metric("compute", "memory/copy", "GB/s", "higher", rate, yardstick=yardstick, bound=0.1)
    flops = rates(2 * SIZE**3 / 1e9, found["product"])
    yield Metric("compute", "compute/rate", "GFLOP/s", "none", flops)
