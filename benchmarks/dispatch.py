"""Measures the round trip of a batch to two actors, and empty calls to four actors, compared with
verl and bare Ray.

When a process first accesses the object store, it takes a page fault per 4 KiB, which costs half a
second for the 416 MB of a round trip, and Ray may place objects anywhere in the store. The store is
therefore small and the warm-up long, so that every process has touched all of it before timing
starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.support import peer
from benchmarks.support.workers import COLUMNS, Echo, Plain, peer_group

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.rounds import Call, Side, Timed
from hybridflow.config.schema import ClusterConfig
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup

CALLS = 200
STORE = 2 << 30
ROWS = 1024
TOKENS = 3173  # per row: eight columns of eight bytes are 208 MB
SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


@measurement("dispatch", timeout_s=1200, rounds=11, warm_up=10)
def dispatch(place: Place) -> Iterator[Timed]:
    """round trip of 208 MB to two actors, and empty calls to four actors, compared with verl and
    bare Ray"""
    peer.install()
    folders = [
        os.environ.get("PYTHONPATH", ""),
        str(Path(__file__).parents[1]),
        str(peer.FOLDER),
    ]
    # the actors import both packages
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    config = ClusterConfig(
        procs_per_node=4,
        start_timeout_s=120,
        call_timeout_s=120,
        object_store_bytes=STORE,
    )
    with Cluster.start(config, str(place.local), num_cpus=32) as cluster:
        yield from _round_trip(cluster, place.local)
        yield _empty_call(cluster, place.local)


def _sides(
    cluster: Cluster, folder: Path, ranks: int
) -> tuple[WorkerGroup, Any, list[Any]]:
    """Start the worker group, the peer's worker group, and bare actors."""
    import ray

    pool = ResourcePool.allocate(cluster, 1, ranks)
    group = WorkerGroup(cluster, pool, Echo, role=f"ours{ranks}", log_dir=folder)
    return group, peer_group(ranks), [ray.remote(Plain).remote() for _ in range(ranks)]


def _round_trip(cluster: Cluster, folder: Path) -> Iterator[Timed]:
    import ray
    import torch
    from verl.protocol import DataProto as PeerProto

    group, theirs, bare = _sides(cluster, folder, 2)
    random = np.random.default_rng(0)
    columns = {name: random.integers(0, 50_000, (ROWS, TOKENS)) for name in COLUMNS}
    batch = DataProto.from_columns(columns)
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    peer_batch = PeerProto.from_dict(tensors)
    middle = ROWS // 2
    first = {name: values[:middle] for name, values in columns.items()}
    second = {name: values[middle:] for name, values in columns.items()}

    def with_peer(method: str) -> Callable[[], object]:
        def call() -> object:
            os.environ[SERIALIZATION] = method
            theirs.serialize_with(method)
            return theirs.echo(peer_batch)

        return call

    def with_ray() -> object:
        sent = zip(bare, (first, second), strict=True)
        return ray.get([actor.echo.remote(ray.put(half)) for actor, half in sent])

    back = group.run(Echo.echo, batch)
    for name, values in columns.items():
        assert np.array_equal(back[name], values), name
    label = "208 MB to 2 actors and back"
    yield Timed(
        {
            f"{label}, as references": lambda: group.run(Echo.echo, batch),
            f"{label}, fetched": lambda: group.run(Echo.echo, batch).fetch(),
        },
        Side("bare Ray", with_ray),
        peers=[
            Side(f"{peer.NAME} {mode}", with_peer(mode))
            for mode in ("default", "numpy")
        ],
    )
    group.kill()


def _empty_call(cluster: Cluster, folder: Path) -> Timed:
    import ray

    group, theirs, bare = _sides(cluster, folder, 4)

    def repeated(call: Call) -> Call:
        def run() -> None:
            for _ in range(CALLS):
                call()

        return run

    def with_ray() -> None:
        ray.get([actor.nothing.remote() for actor in bare])

    return Timed(
        {
            f"{CALLS} calls that do nothing to 4 actors": repeated(
                lambda: group.run(Echo.nothing)
            )
        },
        Side("bare Ray", repeated(with_ray)),
        peers=[Side(peer.NAME, repeated(theirs.nothing))],
    )
