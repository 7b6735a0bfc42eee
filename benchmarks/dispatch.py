"""A 208 MB batch to two actors and back, what that leaves in the driver, and a call that does nothing to four actors.

Peers: verl's worker group over the same Ray cluster, with its default serialization and with its numpy mode; a bare Ray
actor with `ray.put` and `ray.get` of the same bytes is the limit (its results are two views of the store). Two figures
of ours: the batch of references that a call returns and other calls take, and the batch with all columns fetched to one
contiguous array each.

Before the clock runs every process of every side has written the whole store once. A process that meets a page of the
store for the first time takes a fault for each 4 KiB (and the first of all has the kernel zero it): half a second for
the 416 MB of a round trip, which the store puts wherever there is room, so that chance decided who paid. In a run the
store is soon as warm for all.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hybridflow.batch import DataProto
from hybridflow.bench.measurements.base import interleaved
from hybridflow.config.schema import ClusterConfig
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup
from support import batches, peer
from support.report import Figure, faster, median, write
from support.workers import Echo, peer_worker, plain_actor

ROUNDS, CALLS = 11, 200
STORE = 4 << 30
FILLS = STORE * 93 // 100  # an object of this size still fits into the store
FREED_S = 2.0  # Ray frees the memory of objects that are let go of once a second
TOTAL, ROWS = 208_000_000, 1024
SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def start_peer(ranks: int) -> Any:
    """verl's RayWorkerGroup without GPUs."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1, name_prefix=f"peer{ranks}")
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(peer_worker())), device_name="cpu")


def round_trip(cluster: Cluster, folder: Path) -> list[Figure]:
    """The batch to two actors and back."""
    import ray

    group = WorkerGroup(cluster, ResourcePool.allocate(cluster, 1, 2), Echo, role="ours", log_dir=folder)
    theirs = start_peer(2)
    raw = [ray.remote(plain_actor()).remote() for _ in range(2)]
    columns = batches.arrays(TOTAL, ROWS)
    batch, peer_batch = batches.ours(columns), batches.theirs(columns)
    halves = [{name: values[i * ROWS // 2 : (i + 1) * ROWS // 2] for name, values in columns.items()} for i in range(2)]

    def peer_side(method: str) -> Callable[[], Any]:
        def call() -> Any:
            os.environ[SERIALIZATION] = method
            theirs.serialize_with(method)
            return theirs.echo(peer_batch)

        return call

    def bare() -> Any:
        return ray.get([actor.echo.remote(ray.put(half)) for actor, half in zip(raw, halves, strict=True)])

    sides = {
        "ours, as references": lambda: group.run(Echo.echo, batch),
        "ours, fetched": lambda: group.run(Echo.echo, batch).fetch(),
        "default": peer_side("default"),
        "numpy": peer_side("numpy"),
        "ray": bare,
    }
    warm(group, [*raw, *theirs.workers])
    check(group.run(Echo.echo, batch), columns)
    seconds = {name: median(values) for name, values in interleaved(sides, ROUNDS).items()}
    figures = []
    for side in ("ours, as references", "ours, fetched"):
        label = f"208 MB to 2 actors and back{side.removeprefix('ours')}"
        figures += [
            faster(label, seconds[side], seconds["default"], f"{peer.NAME} default", limit=seconds["ray"]),
            faster(label, seconds[side], seconds["numpy"], f"{peer.NAME} numpy mode", limit=seconds["ray"]),
        ]
    figures += memory(
        {"ours": sides["ours, as references"], "default": sides["default"], "numpy": sides["numpy"], "ray": bare}
    )
    group.kill()
    return figures


def warm(group: WorkerGroup, actors: list[Any]) -> None:
    """Every process writes the whole store: the driver, the ranks of our group and these actors."""
    import ray

    ours = [lambda rank=rank: group.submit(Echo.zeros, FILLS, only=[rank]).result() for rank in range(group.world_size)]
    bare = [lambda actor=actor: ray.wait([actor.zeros.remote(FILLS)]) for actor in actors]
    for write_all in (lambda: ray.put(np.zeros(FILLS, np.uint8)), *ours, *bare):
        write_all()
        time.sleep(FREED_S)


def check(result: DataProto, columns: dict[str, np.ndarray]) -> None:
    """What came back is what was sent, however it is read."""
    middle = ROWS // 2
    for name, values in columns.items():
        assert np.array_equal(result[name], values)
        assert np.array_equal(result.rows(middle + 1)[name][0], values[middle + 1])
        assert np.array_equal(result.rows(slice(middle, None)).torch(name).numpy(), values[middle:])


def memory(sides: dict[str, Callable[[], Any]]) -> list[Figure]:
    """Resident memory of the driver after the round trip, result held and read, less before; the middle of five, in
    parts of the batch."""
    process, growth = psutil.Process(), {}
    for name, call in sides.items():
        grown = []
        for _ in range(6):
            before = process.memory_info().rss
            result = call()
            grown.append((process.memory_info().rss - before) / TOTAL)
            del result
        growth[name] = max(0.0, median(grown[1:]))  # the first maps the store's pages
    label = "driver memory grown over the round trip, share of the batch"
    return [
        Figure(label, growth["ours"], "of 208 MB", f"{peer.NAME} {mode}", growth[mode]) for mode in ("default", "numpy")
    ]


def no_op(cluster: Cluster, folder: Path) -> list[Figure]:
    """A call that does nothing to four actors."""
    import ray

    group = WorkerGroup(cluster, ResourcePool.allocate(cluster, 1, 4), Echo, role="ours", log_dir=folder)
    theirs = start_peer(4)
    raw = [ray.remote(plain_actor()).remote() for _ in range(4)]

    def repeated(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                call()

        return run

    sides = {
        "ours": repeated(lambda: group.run(Echo.nothing)),
        "peer": repeated(theirs.nothing),
        "ray": repeated(lambda: ray.get([actor.nothing.remote() for actor in raw])),
    }
    seconds = {name: median(values) / CALLS for name, values in interleaved(sides, ROUNDS).items()}
    group.kill()
    return [
        faster(
            "a call that does nothing to 4 actors", seconds["ours"], seconds["peer"], peer.NAME, limit=seconds["ray"]
        )
    ]


def main() -> None:
    """All figures."""
    peer.install()
    paths = [str(Path(__file__).parent), str(peer.FOLDER)]
    # the actors import both
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *paths])
    with tempfile.TemporaryDirectory() as folder:
        config = ClusterConfig(
            nodes=1, procs_per_node=4, start_timeout_s=120, call_timeout_s=120, object_store_bytes=STORE
        )
        with Cluster.start(config, folder, num_cpus=32) as cluster:
            figures = round_trip(cluster, Path(folder)) + no_op(cluster, Path(folder))
    note = {
        "bytes": TOTAL,
        "rounds": ROUNDS,
        "calls": CALLS,
        "statistic": "median",
        "limit": "bare Ray in the same run",
    }
    write("dispatch", figures, note)


if __name__ == "__main__":
    main()
