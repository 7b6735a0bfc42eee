"""Measures GAE advantages and returns with whitening, compared with verl's padded loop over
tokens."""

from __future__ import annotations

import torch
from benchmarks.support import peer

from hybridflow.bench.measurements.advantages import sides
from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.rounds import Side, Timed

ROWS = 1024
LONGEST = 7168


@measurement("gae", timeout_s=600, rounds=5)
def gae(place: Place) -> Yields:
    """GAE and whitening of 1,024 responses of up to 7,168 tokens compared with verl's loop and a
    copy"""
    peer.install()
    generator = torch.Generator().manual_seed(1)
    full = torch.full((ROWS,), LONGEST)
    drawn = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    yield _case("all of 7168 tokens", full, generator)
    yield _case("of 1 to 7168 tokens", drawn, generator)


def _case(name: str, lengths: torch.Tensor, generator: torch.Generator) -> Timed:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    rewards, values = torch.randn(2, ROWS, LONGEST, generator=generator) * mask
    ours, limit = sides(rewards[mask], values[mask], lengths)

    def theirs() -> None:
        compute_gae_advantage_return(rewards, values, mask.float(), 1.0, 0.95)

    calls = {f"GAE and whitening, 1024 rows {name}": ours}
    return Timed(calls, limit, peers=[Side(peer.NAME, theirs)])
