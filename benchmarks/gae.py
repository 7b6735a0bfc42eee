"""Advantages and returns from values, whitened, for 1024 responses of up to 7168 tokens, against verl's padded loop
over tokens."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import torch

from hybridflow.algorithms.whitening import whiten
from hybridflow.bench.measurements.base import interleaved
from hybridflow_kernels.scans import gae
from support import peer
from support.report import Figure, faster, median, write

ROUNDS, ROWS, LONGEST, GAMMA, LAM = 5, 1024, 7168, 1.0, 0.95


def main() -> None:
    """All figures."""
    peer.install()
    torch.set_num_threads(1)
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    generator = torch.Generator().manual_seed(1)
    lengths_of = {
        "all of 7168 tokens": torch.full((ROWS,), LONGEST),
        "of 1 to 7168 tokens": torch.randint(1, LONGEST + 1, (ROWS,), generator=generator),
    }
    figures: list[Figure] = []
    for name, lengths in lengths_of.items():
        mask = torch.arange(LONGEST)[None] < lengths[:, None]
        rewards, values = (torch.randn(ROWS, LONGEST, generator=generator) * mask for _ in range(2))
        packed_rewards, packed_values, mask_float = rewards[mask], values[mask], mask.float()

        def ours() -> None:
            advantages, _ = gae(packed_rewards, packed_values, lengths, gamma=GAMMA, lam=LAM)  # noqa: B023  called within this turn
            whiten(advantages)

        def theirs() -> None:
            compute_gae_advantage_return(rewards, values, mask_float, GAMMA, LAM)  # noqa: B023

        def copy() -> None:
            for _ in range(2):  # reads two columns, writes two
                packed_rewards.clone(), packed_values.clone()  # noqa: B023

        seconds = {
            side: median(found)
            for side, found in interleaved({"ours": ours, "peer": theirs, "copy": copy}, ROUNDS).items()
        }
        figures.append(
            faster(
                f"GAE and whitening, 1024 rows {name}",
                seconds["ours"],
                seconds["peer"],
                peer.NAME,
                limit=seconds["copy"],
            )
        )
    note = {
        "rounds": ROUNDS,
        "statistic": "median",
        "limit": "torch allocate-and-copy of two columns read and two written",
    }
    write("gae", figures, note)


if __name__ == "__main__":
    main()
