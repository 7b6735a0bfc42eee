"""Measures collectives between two processes on one node."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from hybridflow.bench.measurements.base import ROUNDS, Place, Yields, measurement
from hybridflow.bench.rounds import Call, Side, Timed, interleaved, repeated
from hybridflow.errors import ResourceError

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
WORLD = 2
WARM_UP = 2
# Bytes on the wire per rank divided by bytes of the buffer (nccl-tests, PERFORMANCE.md).
BUS = {"all_reduce": 1.0, "all_gather": 0.5, "broadcast": 1.0}  # with two ranks
AT_LEAST = 4 << 20  # minimum bytes moved by a timed call


@measurement("collectives", "micro", timeout_s=120, warm_up=WARM_UP)
def collectives(place: Place) -> Yields:
    """bus bandwidth of all-reduce, all-gather and broadcast between two processes, by size"""
    store = str(place.local / "store")
    fork = multiprocessing.get_context("fork")
    other = fork.Process(target=_follow, args=(store,), daemon=True)
    other.start()
    yield from _cases(0, store)
    other.join(30)
    if other.exitcode:
        raise ResourceError(f"the second rank exited with status {other.exitcode}")


def _follow(store: str) -> None:
    """Run the second rank, which makes the same calls in the same order."""
    for case in _cases(1, store):
        interleaved(case.sides(), ROUNDS, WARM_UP)


def _cases(rank: int, store: str) -> Iterator[Timed]:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    for size, nbytes in SIZES.items():
        values = torch.zeros(nbytes // 4)
        halves = list(torch.zeros(nbytes // 4).chunk(WORLD))
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, values),
            "all_gather": partial(dist.all_gather, halves, halves[rank]),
            "broadcast": partial(dist.broadcast, values, 0),
        }
        repeats = max(1, AT_LEAST // nbytes)
        bare = _between_barriers(partial(_there_and_back, values), repeats)
        for kind, call in calls.items():
            yield Timed(
                {f"{kind}/{size}, bus": _between_barriers(call, repeats)},
                # a round trip moves twice the buffer
                yardstick=Side(
                    "a plain gloo send and reply", bare, scale=BUS[kind] / 2
                ),
                amount=repeats * nbytes * BUS[kind] / 1e9,
                unit="GB/s",
                bound=0.15,
            )
    dist.destroy_process_group()


def _between_barriers(call: Call, repeats: int) -> Call:
    import torch.distributed as dist

    def run() -> None:
        dist.barrier()
        repeated(call, repeats)()
        dist.barrier()

    return run


def _there_and_back(values: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(values, 1)
        dist.recv(values, 1)
    else:
        dist.recv(values, 0)
        dist.send(values, 0)
