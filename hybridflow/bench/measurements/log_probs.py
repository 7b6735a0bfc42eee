"""Log-probabilities of targets over a vocabulary."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hybridflow.bench.measurements.base import PROCESSES, ROUNDS_EACH, Place, interleaved, measurement
from hybridflow.bench.result import Metric, Reference

TOKENS, HIDDEN, VOCAB = 256, 128, 8192


@measurement("log_probs", "micro", processes=PROCESSES)
def log_probs(place: Place) -> Iterator[Metric]:
    """log-probabilities of 256 tokens over a vocabulary of 8,192 beside the matrix product alone"""
    import torch
    import torch.distributed as dist

    from hybridflow.algorithms.vocab_parallel import Scoring, log_probs_and_entropy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=generator) for rows in (TOKENS, VOCAB))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)

    scoring = Scoring(VOCAB, 1.0, with_entropy=False)
    with torch.no_grad():
        found = interleaved(
            {
                "ours": lambda: log_probs_and_entropy(hidden, weight, targets, scoring, None),
                "product": lambda: hidden @ weight.T,
            },
            rounds=ROUNDS_EACH,
            warm_up=3,
            clock=time.process_time,
        )
    limit = Reference("the matrix product alone", tuple(found["product"]))
    yield Metric("log_probs", "log_probs/forward", "s", "lower", tuple(found["ours"]), limit, bound=0.1)
