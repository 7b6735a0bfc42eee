"""Micro-batches under a token budget and balance over ranks, against verl's `rearrange_micro_batches` and
Karmarkar-Karp."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from hybridflow.bench.measurements.base import interleaved
from hybridflow.data.packing import balance, pack
from support import peer
from support.report import Figure, faster, median, write

ROUNDS = 5
BUDGET = 16384


def micro_batch_lengths() -> np.ndarray:
    """512 lognormal lengths up to 16 k tokens; 116 micro-batches is what their tokens fill."""
    return np.clip(np.random.default_rng(13).lognormal(8.0, 0.6, 512), 32, BUDGET).astype(np.int64)


def balance_lengths() -> np.ndarray:
    """8,192 lognormal lengths up to 16 k tokens."""
    return np.clip(np.random.default_rng(0).lognormal(7.2, 0.8, 8192), 32, BUDGET).astype(np.int64)


def imbalance(lengths: np.ndarray, groups: Sequence[Sequence[int]]) -> float:
    """Largest sum over the mean."""
    sums = [int(lengths[np.asarray(group)].sum()) for group in groups]
    return max(sums) / (sum(sums) / len(sums))


def micro_batches() -> list[Figure]:
    """Time and number of micro-batches of one batch."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    lengths = micro_batch_lengths()
    mask = torch.arange(int(lengths.max()))[None, :] < torch.tensor(lengths)[:, None]
    batch = TensorDict(
        {"input_ids": mask.to(torch.int8), "attention_mask": mask.to(torch.int8)}, batch_size=[len(lengths)]
    )
    found: dict[str, int] = {}
    sides = {
        "ours": lambda: found.update(ours=len(pack(lengths, BUDGET))),
        "verl": lambda: found.update(verl=len(rearrange_micro_batches(batch, BUDGET)[1])),
    }
    seconds = interleaved(sides, ROUNDS)
    bound = math.ceil(int(lengths.sum()) / BUDGET)
    return [
        faster(
            "micro-batching 512 sequences at 16384 tokens", median(seconds["ours"]), median(seconds["verl"]), peer.NAME
        ),
        Figure(
            "micro-batches of 512 sequences at 16384 tokens",
            found["ours"],
            "micro-batches",
            peer.NAME,
            found["verl"],
            found["verl"] / found["ours"],
            bound,
            bound / found["ours"],
        ),
    ]


def balancing(num_ranks: int) -> list[Figure]:
    """Time and evenness of 8,192 sequences over `num_ranks`; with equal counts too, as the trainer needs it."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    lengths, groups = balance_lengths(), {}
    plain = lengths.tolist()
    sides = {
        "ours": lambda: groups.update(ours=balance(lengths, num_ranks)),
        "ours, equal counts": lambda: groups.update(
            {"ours, equal counts": balance(lengths, num_ranks, equal_counts=True)}
        ),
        "verl": lambda: groups.update(verl=get_seqlen_balanced_partitions(plain, num_ranks, False)),
    }
    seconds = interleaved(sides, ROUNDS, warm_up=0 if num_ranks > 100 else 1)
    figures = []
    for side in ("ours", "ours, equal counts"):
        label = f"8192 sequences over {num_ranks} ranks{side.removeprefix('ours')}"
        theirs = imbalance(lengths, groups["verl"])
        ours = imbalance(lengths, groups[side])
        figures += [
            faster(
                f"balance of {label}", median(seconds[side]), median(seconds["verl"]), f"{peer.NAME} Karmarkar-Karp"
            ),
            Figure(
                f"max/mean, {label}",
                round(ours, 6),
                "",
                f"{peer.NAME} Karmarkar-Karp",
                round(theirs, 6),
                theirs / ours,
                1.0,
                1 / ours,
            ),
        ]
    return figures


def main() -> None:
    """All figures."""
    peer.install()
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures = micro_batches() + balancing(512) + balancing(64)
    note = {"rounds": ROUNDS, "statistic": "median", "seconds_in_all": round(time.perf_counter() - start)}
    write("batching", figures, note)


if __name__ == "__main__":
    main()
