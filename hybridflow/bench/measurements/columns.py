"""Measures concatenation and reordering of batch columns, compared with a copy of the same
bytes."""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS_EACH,
    Place,
    Yields,
    measurement,
)
from hybridflow.bench.rounds import Side, Timed

ROWS = 512
PARTS = 16
TOKENS = 2_000_000


@measurement(
    "columns",
    "micro",
    processes=PROCESSES,
    rounds=ROUNDS_EACH,
    warm_up=2,
    cpu_time=True,
)
def columns(place: Place) -> Yields:
    """concatenation and reordering of a 32 MB jagged batch, compared with a copy of its bytes"""
    random = np.random.default_rng(1)
    cuts = np.sort(random.integers(0, TOKENS, ROWS - 1))
    offsets = np.concatenate([[0], cuts, [TOKENS]])
    ids = random.integers(0, 50_000, TOKENS)
    log_probs = random.random(TOKENS)
    batch = DataProto.from_columns(
        {
            "response_ids": Jagged(ids, offsets),
            "old_log_probs": Jagged(log_probs, offsets),
        }
    )
    parts = batch.split(ROWS // PARTS)
    order = random.permutation(ROWS)
    calls = {
        "columns/concat": lambda: DataProto.concat(parts),
        "columns/reorder": lambda: batch.reorder(order),
    }
    limit = Side("a copy of the same bytes", lambda: (ids.copy(), log_probs.copy()))
    yield Timed(calls, limit, bound=0.1)
