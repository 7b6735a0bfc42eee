"""Measures weight syncs over tcp, gloo and shared memory, compared with bare sends, a copy, and
verl's buckets.

Within a part, all sides run in turn, in the same processes and on the same tensors. A sync is timed
from the command to the last rank's reply. Before timing, one sync is verified element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from benchmarks.support import peer
from benchmarks.support.bucket_ranks import BucketRanks
from benchmarks.support.pool import Pool, free_port
from benchmarks.support.reshard_ranks import Ranks

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, measured
from hybridflow.bench.rounds import Call, Side, Timed, interleaved
from hybridflow.errors import ConfigError
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape

ROUNDS = 9
MIB = 1 << 20
WIRES = {"p2p": "gloo", "tcp": "tcp"}  # transports between any two hosts
MODES = {"in place": False, "staged": True}
MODELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# 2048: verl/workers/config/rollout.py:135, passed on in vllm_rollout.py:235; 512: the default in
# bucketed_weight_transfer.py:89
PEER_MIB = (2048, 512, 64)


@measurement("reshard_transfer", timeout_s=1800, rounds=ROUNDS)
def reshard_transfer(
    place: Place, part: str = "layers,small,one host"
) -> Iterator[Timed | Metric]:
    """weight syncs over tcp and gloo compared with bare sends, and over shared memory compared with
    verl and a copy"""
    for name in part.split(","):
        if name == "one host":
            yield from _on_one_host(place)
        elif name in MODELS:
            yield from _between_hosts(name, MODELS[name])
        else:
            raise ConfigError(f"part={name}: no such part; parts: {', '.join(MODELS)}")


def _between_hosts(name: str, hf: dict[str, Any]) -> Iterator[Timed | Metric]:
    """Sync from four Megatron ranks (TP2, PP2, EP2) to one engine with two ranks."""
    make = partial(
        Ranks,
        hf=hf,
        trainer=ParallelShape(4, tensor=2, pipeline=2, expert=2),
        engine=EngineShape(tensor=2),
        port=free_port(),
        staging=80 * MIB,
        transports=tuple(WIRES),
    )
    pool = Pool(6, make)
    try:
        total = _checked(pool, tuple(WIRES), 4)
        yield measured(f"{name}: bytes", "count", total, "lower")
        for transport, wire in WIRES.items():
            label = f"{name} over {wire}"
            bare = partial(pool.run, "bare", transport)
            calls = _calls(pool, label, transport)
            limit = Side("bare gloo", bare)
            yield Timed(calls, limit, amount=total / 1e9, unit="GB/s", bound=0.15)
            yield _processor_time(
                pool, f"{label}: in place", calls[f"{label}: in place"], bare
            )
            commits = []
            for _ in range(ROUNDS):
                commits.append(
                    max(seconds for _, seconds in pool.run("sync", transport, True))
                )
            yield measured(f"{label}: commit of staged", "s", commits)
    finally:
        pool.stop()


def _on_one_host(place: Place) -> Iterator[Timed | Metric]:
    """Sync 1.7 GB from one rank to another."""
    make = partial(
        BucketRanks,
        folder=str(place.local),
        hf=MODELS["one host"],
        trainer=ParallelShape(1),
        engine=EngineShape(),
        port=free_port(),
        staging=8 * MIB,
        transports=("shared_memory",),
    )
    pool = Pool(2, make)
    try:
        total = _checked(pool, ("shared_memory",), 1)
        yield measured("one host: bytes", "count", total, "lower")
        label = "one host"
        calls = _calls(pool, label, "shared_memory")
        copy = partial(pool.run, "copy")
        buckets = []
        for size in PEER_MIB:
            call = partial(pool.run, "peer_sync", size)
            buckets.append(Side(f"{peer.NAME}, {size} MiB", call))
        yield Timed(calls, Side("a copy", copy), peers=buckets, bound=0.15)
        for name, call in calls.items():
            yield _processor_time(pool, name, call, copy)
    finally:
        pool.stop()


def _calls(pool: Pool, label: str, transport: str) -> dict[str, Call]:
    return {
        f"{label}: {mode}": partial(pool.run, "sync", transport, staged)
        for mode, staged in MODES.items()
    }


def _checked(pool: Pool, transports: tuple[str, ...], trainers: int) -> int:
    """Verify the weights after a sync in each mode. Returns the number of bytes that the engines
    receive."""
    total = 0
    for transport in transports:
        for staged in MODES.values():
            pool.run("forget")
            moved = pool.run("sync", transport, staged)
            assert all(pool.run("check")), f"{transport}: wrong weights arrived"
            total = sum(nbytes for nbytes, _ in moved[trainers:])
    return total


def _processor_time(pool: Pool, name: str, call: Call, limit: Call) -> Metric:
    """Measure the CPU seconds used by all ranks, the quantity least affected by other load."""
    used = interleaved(
        {"call": call, "limit": limit},
        ROUNDS,
        warm_up=0,
        clock=lambda: sum(pool.run("cpu")),
    )
    return measured(
        f"{name}, processor time",
        "s",
        used["call"],
        "lower",
        limit=("the limit's", used["limit"]),
        bound=0.1,
    )
