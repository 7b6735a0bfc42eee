"""Measures weight syncs over tcp, gloo and shared memory, compared with bare sends, a copy, and
verl's buckets.

Within a part, all sides run in turn, in the same processes and on the same tensors. A sync is timed
from the command to the last rank's reply. Before timing, one sync is verified element by element.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import yaml
from benchmarks.support import peer
from benchmarks.support.bucket_ranks import BucketRanks
from benchmarks.support.reshard_ranks import Ranks

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.store import cluster_of, group_of
from hybridflow.bench.result import Metric, measured
from hybridflow.bench.rounds import Call, Side, Timed, interleaved
from hybridflow.errors import ConfigError
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.single_controller import WorkerGroup

ROUNDS = 9
MIB = 1 << 20
STORE = 128 * MIB  # nothing passes through the object store
WIRES = {"p2p": "gloo", "tcp": "tcp"}  # transports between any two hosts
MODES = {"in place": False, "staged": True}
MODELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# 2048: verl/workers/config/rollout.py:135, passed on in vllm_rollout.py:235; 512: the default in
# bucketed_weight_transfer.py:89
PEER_MIB = (2048, 512, 64)


@measurement("reshard_transfer", timeout_s=1800, rounds=ROUNDS)
def reshard_transfer(place: Place, part: str = "layers,small,one host") -> Yields:
    """weight syncs over tcp and gloo compared with bare sends, and over shared memory compared with
    verl and a copy"""
    peer.be_importable()
    for name in part.split(","):
        if name == "one host":
            yield from _on_one_host(place)
        elif name in MODELS:
            yield from _between_hosts(place, name)
        else:
            raise ConfigError(f"part={name}: no such part; parts: {', '.join(MODELS)}")


def _between_hosts(place: Place, name: str) -> Yields:
    """Sync from four Megatron ranks (TP2, PP2, EP2) to one engine with two ranks."""
    trainer = ParallelShape(4, tensor=2, pipeline=2, expert=2)
    settings = (MODELS[name], trainer, EngineShape(tensor=2), 80 * MIB, tuple(WIRES))
    with cluster_of(place, 6, STORE) as cluster:
        group = group_of(cluster, place, 6, Ranks, *settings)
        total = _checked(group, tuple(WIRES), 4)
        yield measured(f"{name}: bytes", "count", total, "lower")
        for transport, wire in WIRES.items():
            label = f"{name} over {wire}"
            bare = partial(group.run, Ranks.bare, transport)
            calls = _calls(group, label, transport)
            limit = Side("bare gloo", bare)
            yield Timed(calls, limit, amount=total / 1e9, unit="GB/s", bound=0.15)
            in_place = f"{label}: in place"
            yield _processor_time(group, in_place, calls[in_place], bare)
            commits = []
            for _ in range(ROUNDS):
                moved = group.run(Ranks.sync, transport, True)
                commits.append(max(seconds for _, seconds in moved))
            yield measured(f"{label}: commit of staged", "s", commits)


def _on_one_host(place: Place) -> Yields:
    """Sync 1.7 GB from one rank to another."""
    model = MODELS["one host"]
    trainer = ParallelShape(1)
    settings = (model, trainer, EngineShape(), 8 * MIB, ("shared_memory",))
    with cluster_of(place, 2, STORE) as cluster:
        group = group_of(cluster, place, 2, BucketRanks, str(place.local), *settings)
        total = _checked(group, ("shared_memory",), 1)
        yield measured("one host: bytes", "count", total, "lower")
        calls = _calls(group, "one host", "shared_memory")
        copy = partial(group.run, BucketRanks.copy)
        buckets = []
        for size in PEER_MIB:
            call = partial(group.run, BucketRanks.peer_sync, size)
            buckets.append(Side(f"{peer.NAME}, {size} MiB", call))
        yield Timed(calls, Side("a copy", copy), peers=buckets, bound=0.15)
        for name, call in calls.items():
            yield _processor_time(group, name, call, copy)


def _calls(group: WorkerGroup, label: str, transport: str) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for mode, staged in MODES.items():
        call = partial(group.run, Ranks.sync, transport, staged)
        calls[f"{label}: {mode}"] = call
    return calls


def _checked(group: WorkerGroup, transports: tuple[str, ...], trainers: int) -> int:
    """Verify the weights after a sync in each mode. Returns the number of bytes that the engines
    receive."""
    total = 0
    for transport, staged in product(transports, MODES.values()):
        group.run(Ranks.forget)
        moved = group.run(Ranks.sync, transport, staged)
        assert all(group.run(Ranks.check)), f"{transport}: wrong weights arrived"
        total = sum(nbytes for nbytes, _ in moved[trainers:])
    return total


def _processor_time(group: WorkerGroup, name: str, call: Call, limit: Call) -> Metric:
    """Measure the CPU seconds used by all ranks, the quantity least affected by other load."""
    used = interleaved(
        {"call": call, "limit": limit},
        ROUNDS,
        warm_up=0,
        clock=lambda: sum(group.run(Ranks.cpu)),
    )
    return measured(
        f"{name}, processor time",
        "s",
        used["call"],
        "lower",
        limit=("the limit's", used["limit"]),
        bound=0.1,
    )
