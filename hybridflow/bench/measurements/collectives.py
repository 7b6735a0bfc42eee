"""Collectives of two processes on one node."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from hybridflow.bench.measurements.base import ROUNDS, Place, measurement, rates
from hybridflow.bench.result import Metric, Reference
from hybridflow.errors import ResourceError

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
WORLD = 2
# Bytes on the wire of each rank over bytes of the buffer (nccl-tests, PERFORMANCE.md).
BUS = {"all_reduce": 2 * (WORLD - 1) / WORLD, "all_gather": (WORLD - 1) / WORLD, "broadcast": 1.0}


@measurement("collectives", "micro", timeout_s=120)
def collectives(place: Place) -> Iterator[Metric]:
    """all-reduce, all-gather and broadcast of two processes by size: algorithm and bus bandwidth"""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        other = multiprocessing.get_context("fork").Process(target=_measure, args=(1, store), daemon=True)
        other.start()
        found = _measure(0, store)
        other.join(30)
    if other.exitcode:
        raise ResourceError(f"the second rank ended with status {other.exitcode}")
    for (kind, size), (seconds, bare) in found.items():
        bytes_ = SIZES[size]
        there_and_back = Reference("gloo's bare send there and back", rates(2 * bytes_ / 1e9, bare))
        rate = rates(bytes_ * BUS[kind] / 1e9, seconds)
        yield Metric("collectives", f"{kind}/{size}, bus", "GB/s", "higher", rate, yardstick=there_and_back,
                     bound=0.15)  # fmt: skip
        if kind == "all_reduce":
            algorithm = rates(bytes_ / 1e9, seconds)
            yield Metric("collectives", f"{kind}/{size}, algorithm", "GB/s", "none", algorithm)


def _measure(rank: int, store: str) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Both ranks do the same in step: each collective, and a send there and back, in turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {}
    for size, bytes_ in SIZES.items():
        values = torch.zeros(bytes_ // 4)
        halves = list(torch.zeros(bytes_ // 4).chunk(WORLD))
        jobs = {
            "all_reduce": lambda values=values: dist.all_reduce(values),
            "all_gather": lambda halves=halves: dist.all_gather(halves, halves[rank]),
            "broadcast": lambda values=values: dist.broadcast(values, 0),
        }
        repeats = max(1, (4 << 20) // bytes_)
        for kind, job in jobs.items():
            seconds: list[float] = []
            bare: list[float] = []
            for turn in range(ROUNDS + 2):
                first, second = _timed(dist, job, repeats), _timed(dist, lambda v=values: _there_and_back(v), repeats)
                if turn >= 2:
                    seconds.append(first)
                    bare.append(second)
            found[kind, size] = (seconds, bare)
    dist.destroy_process_group()
    return found


def _timed(dist: Any, job: Any, repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        job()
    dist.barrier()
    return (time.perf_counter() - start) / repeats


def _there_and_back(values: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(values, 1)
        dist.recv(values, 1)
    else:
        dist.recv(values, 0)
        dist.send(values, 0)
