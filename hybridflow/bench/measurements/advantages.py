"""Generalized advantage estimation."""

from __future__ import annotations

from typing import Any

from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS_EACH,
    Place,
    Yields,
    measurement,
)
from hybridflow.bench.rounds import Call, Side, Timed, repeated

ROWS = 256
LONGEST = 2048
COPIES = 20


@measurement(
    "advantages",
    "micro",
    processes=PROCESSES,
    rounds=ROUNDS_EACH,
    warm_up=3,
    cpu_time=True,
)
def advantages(place: Place) -> Yields:
    """GAE and whitening of 256 responses of 1 to 2,048 tokens, compared with a copy of their
    columns"""
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    rewards, values = torch.randn(2, int(lengths.sum()), generator=generator)
    call, limit = sides(rewards, values, lengths)
    yield Timed({"advantages/gae and whitening": call}, limit, bound=0.1)


def sides(rewards: Any, values: Any, lengths: Any) -> tuple[Call, Side]:
    """Return the estimate for packed columns, and a copy of them as its limit."""
    from hybridflow.algorithms.whitening import whiten
    from hybridflow_kernels.scans import gae

    def estimate() -> None:
        whiten(gae(rewards, values, lengths, gamma=1.0, lam=0.95)[0])

    def copy() -> None:
        rewards.clone()
        values.clone()

    name = "a copy of two columns read and two written"
    return estimate, Side(name, repeated(copy, COPIES), scale=2 / COPIES)
