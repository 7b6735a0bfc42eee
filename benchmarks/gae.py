"""Measures GAE advantages and returns with whitening, compared with verl's padded loop over
tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from benchmarks.support import peer

from hybridflow.algorithms.whitening import whiten
from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.rounds import Side, Timed
from hybridflow_kernels.scans import gae as estimate

ROWS = 1024
LONGEST = 7168


@measurement("gae", timeout_s=600, rounds=5)
def gae(place: Place) -> Iterator[Timed]:
    """GAE and whitening of 1,024 responses of up to 7,168 tokens compared with verl's loop and a
    copy"""
    peer.install()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    full = torch.full((ROWS,), LONGEST)
    drawn = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    for name, lengths in {
        "all of 7168 tokens": full,
        "of 1 to 7168 tokens": drawn,
    }.items():
        yield _case(f"GAE and whitening, 1024 rows {name}", lengths, generator)


def _case(name: str, lengths: torch.Tensor, generator: torch.Generator) -> Timed:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    rewards = torch.randn(ROWS, LONGEST, generator=generator) * mask
    values = torch.randn(ROWS, LONGEST, generator=generator) * mask
    packed_rewards = rewards[mask]
    packed_values = values[mask]

    def ours() -> None:
        whiten(estimate(packed_rewards, packed_values, lengths, gamma=1.0, lam=0.95)[0])

    def theirs() -> None:
        compute_gae_advantage_return(rewards, values, mask.float(), 1.0, 0.95)

    def copy() -> None:
        for _ in range(2):  # reads two columns, writes two
            packed_rewards.clone()
            packed_values.clone()

    limit = Side("a copy of two columns read and two written", copy)
    return Timed({name: ours}, limit, peers=[Side(peer.NAME, theirs)])
