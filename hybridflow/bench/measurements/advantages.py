"""Generalized advantage estimation."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hybridflow.bench.measurements.base import PROCESSES, ROUNDS_EACH, Place, interleaved, measurement
from hybridflow.bench.result import Metric, Reference

ROWS, LONGEST = 256, 2048


@measurement("advantages", "micro", processes=PROCESSES)
def advantages(place: Place) -> Iterator[Metric]:
    """GAE and whitening of 256 responses of 1 to 2,048 tokens beside a copy of what is read and written"""
    import torch

    from hybridflow.algorithms.whitening import whiten
    from hybridflow_kernels.scans import gae

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    rewards, values = (torch.randn(int(lengths.sum()), generator=generator) for _ in range(2))
    found = interleaved(
        {
            "gae": lambda: whiten(gae(rewards, values, lengths, gamma=1.0, lam=0.95)[0]),
            "copy": lambda: [(rewards.clone(), values.clone()) for _ in range(20)],
        },
        rounds=ROUNDS_EACH,
        warm_up=3,
        clock=time.process_time,
    )
    copies = tuple(one / 10 for one in found["copy"])  # two columns read, two written
    limit = Reference("a copy of two columns read and two written", copies)
    yield Metric("advantages", "advantages/gae and whitening", "s", "lower", tuple(found["gae"]), limit, bound=0.1)
