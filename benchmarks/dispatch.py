"""Measures the round trip of a batch to two actors, and empty calls to four actors, compared with
verl and bare Ray.

When a process first accesses the object store, it takes a page fault per 4 KiB, which costs half a
second for the 416 MB of a round trip, and Ray may place objects anywhere in the store. The store is
therefore small and the warm-up long, so that every process has touched all of it before timing
starts.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
from benchmarks.support import peer
from benchmarks.support.workers import COLUMNS, SERIALIZATION, Echo, Plain, peer_group

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.store import cluster_of, group_of
from hybridflow.bench.rounds import Side, Timed, repeated
from hybridflow.single_controller import Cluster

CALLS = 200
STORE = 2 << 30
ROWS = 1024
TOKENS = 3173  # per row: eight columns of eight bytes are 208 MB


@measurement("dispatch", timeout_s=1200, rounds=11, warm_up=10)
def dispatch(place: Place) -> Yields:
    """round trip of 208 MB to two actors, and empty calls to four actors, compared with verl and
    bare Ray"""
    peer.install()
    peer.be_importable()
    with cluster_of(place, 4, STORE) as cluster:
        yield from _round_trip(cluster, place)
        yield _empty_call(cluster, place)


def _sides(cluster: Cluster, place: Place, ranks: int) -> Any:
    """Start the worker group, the peer's worker group, and bare actors."""
    import ray

    bare = [ray.remote(Plain).remote() for _ in range(ranks)]
    return group_of(cluster, place, ranks, Echo), peer_group(ranks), bare


def _round_trip(cluster: Cluster, place: Place) -> Yields:
    import ray
    import torch
    from verl.protocol import DataProto as PeerProto

    group, theirs, bare = _sides(cluster, place, 2)
    random = np.random.default_rng(0)
    columns = {name: random.integers(0, 50_000, (ROWS, TOKENS)) for name in COLUMNS}
    batch = DataProto.from_columns(columns)
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    peer_batch = PeerProto.from_dict(tensors)
    halves: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for name, values in columns.items():
        halves[0][name], halves[1][name] = np.split(values, 2)

    def with_peer(method: str) -> object:
        os.environ[SERIALIZATION] = method
        theirs.serialize_with(method)
        return theirs.echo(peer_batch)

    def with_ray() -> object:
        sent = zip(bare, halves, strict=True)
        return ray.get([actor.echo.remote(ray.put(half)) for actor, half in sent])

    back = group.run(Echo.echo, batch)
    for name, values in columns.items():
        assert np.array_equal(back[name], values), name
    label = "208 MB to 2 actors and back"
    calls = {
        f"{label}, as references": lambda: group.run(Echo.echo, batch),
        f"{label}, fetched": lambda: group.run(Echo.echo, batch).fetch(),
    }
    peers = []
    for mode in ("default", "numpy"):
        peers.append(Side(f"{peer.NAME} {mode}", partial(with_peer, mode)))
    yield Timed(calls, Side("bare Ray", with_ray), peers=peers)
    group.kill()


def _empty_call(cluster: Cluster, place: Place) -> Timed:
    import ray

    group, theirs, bare = _sides(cluster, place, 4)

    def ours() -> None:
        group.run(Echo.nothing)

    def with_ray() -> None:
        ray.get([actor.nothing.remote() for actor in bare])

    return Timed(
        {f"{CALLS} calls that do nothing to 4 actors": repeated(ours, CALLS)},
        Side("bare Ray", repeated(with_ray, CALLS)),
        peers=[Side(peer.NAME, repeated(theirs.nothing, CALLS))],
    )
