"""Measures the computation of target tokens' log-probabilities over a vocabulary."""

from __future__ import annotations

from hybridflow.bench.measurements.base import (
    PROCESSES,
    ROUNDS_EACH,
    Place,
    Yields,
    measurement,
)
from hybridflow.bench.rounds import Side, Timed

TOKENS = 256
HIDDEN = 128
VOCAB = 8192


@measurement(
    "log_probs",
    "micro",
    processes=PROCESSES,
    rounds=ROUNDS_EACH,
    warm_up=3,
    cpu_time=True,
)
def log_probs(place: Place) -> Yields:
    """log-probabilities of 256 tokens over a vocabulary of 8,192, compared with a bare matrix
    product"""
    import torch
    import torch.distributed as dist

    from hybridflow.algorithms.vocab_parallel import Scoring, log_probs_and_entropy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    scoring = Scoring(VOCAB, 1.0, with_entropy=False)

    @torch.no_grad()
    def forward() -> None:
        log_probs_and_entropy(hidden, weight, targets, scoring, None)

    limit = Side("the matrix product alone", lambda: hidden @ weight.T)
    yield Timed({"log_probs/forward": forward}, limit, bound=0.1)
