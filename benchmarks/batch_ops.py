"""concat, select and reorder of a 445 MB batch, against verl's DataProto and against numpy's allocate-and-copy of the
same bytes."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import interleaved
from support import batches, peer
from support.report import Figure, faster, median, write

ROUNDS = 7
TOTAL = 445_000_000
ROWS, PARTS = 1024, 32


def main() -> None:
    """All figures."""
    peer.install()
    torch.set_num_threads(1)
    from verl.protocol import DataProto as Peer

    columns = batches.arrays(TOTAL, ROWS)
    dense, jagged, theirs = batches.ours(columns), batches.ours_jagged(columns), batches.theirs(columns)
    order = np.random.default_rng(2).permutation(ROWS)
    order_torch = torch.from_numpy(order)
    half = list(batches.COLUMNS[:4])
    size = ROWS // PARTS
    dense_parts, jagged_parts = dense.split(size), jagged.split(size)
    peer_parts = [theirs.slice(i, i + size) for i in range(0, ROWS, size)]

    def copy() -> Any:
        return [values.copy() for values in columns.values()]

    def peer_reorder() -> Any:
        theirs.reorder(order_torch)  # in place: the batch stays a batch of these rows
        return theirs

    operations: dict[str, dict[str, Callable[[], Any]]] = {
        "concat of 32 parts": {
            "dense": lambda: DataProto.concat(dense_parts),
            "jagged": lambda: DataProto.concat(jagged_parts),
            "peer": lambda: Peer.concat(peer_parts),
        },
        "select of 4 columns": {
            "dense": lambda: dense.select(half),
            "jagged": lambda: jagged.select(half),
            "peer": lambda: theirs.select(half),
        },
        "reorder": {
            "dense": lambda: dense.reorder(order),
            "jagged": lambda: jagged.reorder(order),
            "peer": peer_reorder,
        },
    }
    figures: list[Figure] = []
    for name, sides in operations.items():
        seconds = {side: median(values) for side, values in interleaved({**sides, "numpy copy": copy}, ROUNDS).items()}
        for kind in ("dense", "jagged"):
            figures.append(
                faster(
                    f"{name}, {kind}, 445 MB", seconds[kind], seconds["peer"], peer.NAME, limit=seconds["numpy copy"]
                )
            )
    note = {
        "bytes": dense.nbytes,
        "rounds": ROUNDS,
        "statistic": "median",
        "limit": "numpy allocate-and-copy of the same bytes",
    }
    write("batch_ops", figures, note)


if __name__ == "__main__":
    main()
