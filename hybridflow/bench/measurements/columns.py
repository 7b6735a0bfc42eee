"""Batches: joining, choosing and reordering of columns next to a copy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.bench.measurements.base import PROCESSES, ROUNDS_EACH, Place, interleaved, measurement
from hybridflow.bench.result import Metric, Reference

ROWS, PARTS, TOKENS = 512, 16, 2_000_000


@measurement("columns", "micro", processes=PROCESSES)
def columns(place: Place) -> Iterator[Metric]:
    """concat and reorder of a jagged batch of 32 MB beside a copy of its bytes"""
    random = np.random.default_rng(1)
    offsets = np.concatenate([[0], np.sort(random.integers(0, TOKENS, ROWS - 1)), [TOKENS]])
    values = {"response_ids": random.integers(0, 50_000, TOKENS), "old_log_probs": random.random(TOKENS)}
    batch = DataProto.from_columns({name: Jagged(column, offsets) for name, column in values.items()})
    parts, order = batch.split(ROWS // PARTS), random.permutation(ROWS)
    found = interleaved(
        {
            "concat": lambda: DataProto.concat(parts),
            "reorder": lambda: batch.reorder(order),
            "copy": lambda: [column.copy() for column in values.values()],
        },
        rounds=ROUNDS_EACH,
        warm_up=2,
        clock=time.process_time,
    )
    limit = Reference("a copy of the same bytes", tuple(found["copy"]))
    for name in ("concat", "reorder"):
        yield Metric("columns", f"columns/{name}", "s", "lower", tuple(found[name]), limit, bound=0.1)
