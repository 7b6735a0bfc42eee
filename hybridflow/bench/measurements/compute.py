"""Measures the speed of a node's cores and memory."""

from __future__ import annotations

from functools import partial

import numpy as np

from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS_EACH,
    Place,
    Yields,
    measurement,
)
from hybridflow.bench.rounds import Side, Timed, loop, loops

SIZE = 768
COPY = 64 << 20


@measurement(
    "compute",
    "preflight",
    "micro",
    per_node=True,
    processes=PROCESSES,
    rounds=ROUNDS_EACH,
    warm_up=3,
)
def compute(place: Place) -> Yields:
    """speed of the cores (a matrix product, a Python loop) and memory bandwidth"""
    random = np.random.default_rng(1)
    left, right = random.random((2, SIZE, SIZE), dtype=np.float32)
    out = np.empty((SIZE, SIZE), np.float32)
    source = np.ones(COPY, np.uint8)
    target = np.zeros(COPY, np.uint8)

    product = partial(np.matmul, left, right, out=out)
    by_product = Side("a matrix product", product)
    yield Timed(
        {"compute/product": product},
        yardstick=loops(1),
        amount=2 * SIZE**3 / 1e9,
        unit="GFLOP/s",
        bound=0.08,
    )
    place.meet("compute-loop")  # all nodes run each round at the same time
    yield Timed({"compute/loop": loop}, yardstick=by_product, bound=0.08)
    place.meet("compute-copy")
    yield Timed(
        {"memory/copy": partial(np.copyto, target, source)},
        yardstick=by_product,
        amount=2 * COPY / 1e9,
        unit="GB/s",
        bound=0.1,
    )
