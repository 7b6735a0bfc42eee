"""Generalized advantage estimation."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS_EACH,
    Place,
    measurement,
)
from hybridflow.bench.rounds import Side, Timed

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
def advantages(place: Place) -> Iterator[Timed]:
    """GAE and whitening of 256 responses of 1 to 2,048 tokens, compared with a copy of their
    columns"""
    import torch

    from hybridflow.algorithms.whitening import whiten
    from hybridflow_kernels.scans import gae

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    rewards = torch.randn(int(lengths.sum()), generator=generator)
    values = torch.randn(int(lengths.sum()), generator=generator)

    def estimate() -> None:
        whiten(gae(rewards, values, lengths, gamma=1.0, lam=0.95)[0])

    def copy() -> None:
        for _ in range(COPIES):
            rewards.clone()
            values.clone()

    limit = Side("a copy of two columns read and two written", copy, scale=2 / COPIES)
    yield Timed({"advantages/gae and whitening": estimate}, limit, bound=0.1)
