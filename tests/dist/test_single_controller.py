"""Ray for real: one cluster for the module, groups of plain worker classes in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ClusterConfig
from hybridflow.dispatch import MeshError
from hybridflow.errors import EngineError, ModelError, ResourceError, SchemaError, WorkerError
from hybridflow.process.private_folder import ROOM_FOR_RAY
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup
from tests.dist.harness import sc_workers as sw

pytestmark = pytest.mark.slow
CONFIG = ClusterConfig(nodes=1, procs_per_node=4, start_timeout_s=90, call_timeout_s=60)
BEFORE: set[int] = set()  # children that other tests have started: servers of ranks


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    BEFORE.update(process.pid for process in psutil.Process().children(recursive=True))
    with Cluster.start(CONFIG, tmp_path_factory.mktemp("run")) as started:
        yield started
    deadline = time.monotonic() + 60
    while (left := _cluster_processes(started)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"survived shutdown(): {left}"
    assert started.temp_dir is not None
    assert not started.temp_dir.exists()


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> ResourcePool:
    return ResourcePool.allocate(cluster, 1, 4)


@pytest.fixture(scope="module")
def group(
    cluster: Cluster, pool: ResourcePool, tmp_path_factory: pytest.TempPathFactory
) -> WorkerGroup:
    logs = tmp_path_factory.mktemp("logs")
    return WorkerGroup(
        cluster, pool, sw.Worker, role="actor", args=(10,), env={"EXTRA": "yes"}, log_dir=logs
    )


def small_group(
    cluster: Cluster, pool: ResourcePool, where: Path, worker: type = sw.Worker, ranks: int = 2
) -> WorkerGroup:
    part = pool.split([ranks, len(pool) - ranks])[0]
    return WorkerGroup(cluster, part, worker, role="small", log_dir=where)


def batch(rows: int) -> DataProto:
    ids = Jagged.from_rows([np.arange(i + 1) for i in range(rows)], np.int64)
    text = np.asarray([f"t{i}" for i in range(rows)], dtype=object)
    return DataProto.from_columns({"uid": np.arange(rows), "ids": ids, "text": text})


def test_each_rank_gets_its_environment_and_log(group: WorkerGroup) -> None:
    seen = group.run(sw.Worker.environment)
    assert [(e["RANK"], e["LOCAL_RANK"]) for e in seen] == [(str(r), str(r)) for r in range(4)]
    assert {
        (e["WORLD_SIZE"], e["MASTER_ADDR"], e["OMP_NUM_THREADS"], e["EXTRA"]) for e in seen
    } == {("4", "127.0.0.1", "1", "yes")}
    ports = {int(e["MASTER_PORT"]) for e in seen}
    assert len(ports) == 1 and ports.pop() < 32768
    assert [e["pid"] for e in seen] == group.pids()
    assert [path.name for path in group.log_paths()] == [f"actor-rank{r}.log" for r in range(4)]
    assert all(f"rank {r} is up" in path.read_text() for r, path in enumerate(group.log_paths()))


def test_list_and_rank_zero_dispatch(group: WorkerGroup) -> None:
    assert group.run(sw.Worker.add, [1, 2, 3, 4], b=[1, 0, 0, 2]) == [11, 2, 3, 24]
    assert group.run(sw.Worker.who) == 0
    with pytest.raises(SchemaError, match="one value for each of 4 ranks"):
        group.run(sw.Worker.add, [1, 2], b=[1, 1])


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_data_parallel_call_returns_every_row_once_in_order(group: WorkerGroup, rows: int) -> None:
    data = batch(rows)
    out = group.run(sw.Worker.totals, data)
    assert out["uid"].tolist() == list(range(rows))
    assert out["total"].tolist() == [row.sum() for row in data["ids"]]
    assert set(out["rank"].tolist()) <= {1, 3}  # the collecting ranks
    assert not out["total"].flags.writeable


def test_a_call_on_some_ranks_leaves_the_others_alone(group: WorkerGroup) -> None:
    found = group.run(sw.Worker.totals, batch(5), only=[2, 3])
    assert found["uid"].tolist() == list(range(5)) and set(found["rank"].tolist()) == {3}
    assert group.run(sw.Worker.add, [1, 2], [10, 20], only=[0, 3]) == [101, 202]


def test_columns_arrive_read_only_and_come_back_unchanged(group: WorkerGroup) -> None:
    # 3 MiB: through shared memory
    data = batch(8).with_columns(x=np.random.default_rng(0).normal(size=(8, 50_000)))
    out = group.run(sw.Worker.passed_through, data)
    assert not out["writeable"].any()
    assert out.drop(["writeable"]).equals(data)


def test_metrics_come_from_each_collecting_rank_and_padding_is_told(group: WorkerGroup) -> None:
    assert group.run(sw.Worker.size, batch(7), "t") == [("t", 4, 0), ("t", 4, 1)]


def test_missing_column_is_named_before_anything_is_sent(group: WorkerGroup) -> None:
    with pytest.raises(SchemaError, match=r"totals reads column 'ids'"):
        group.run(sw.Worker.totals, batch(4).drop(["ids"]))


def test_calls_run_in_order_and_futures_do_not_block(group: WorkerGroup) -> None:
    futures = [group.call(sw.Worker.nap, i, 0.5) for i in range(3)]
    assert not futures[2].done()
    assert futures[2].result(timeout=120)[0] == [0, 1, 2]
    assert futures[0].done() and futures[0].result()[3] == [0]


def test_non_blocking_method_gives_a_future_and_coroutines_are_awaited(group: WorkerGroup) -> None:
    future = group.run(sw.Worker.async_nap, 0.05)
    assert future.result(timeout=120) == ["rested"] * 4


def test_a_method_of_another_class_is_refused(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"NoMesh.work is not a method of Worker"):
        group.run(sw.NoMesh.work, batch(2))


@pytest.mark.parametrize(
    "case",
    [
        ("model", ModelError, "model trouble"),
        ("value", WorkerError, "ValueError: value trouble"),
        ("engine", EngineError, "it refused"),
    ],
)
def test_first_error_surfaces_while_others_block(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path, case: tuple[str, type[Exception], str]
) -> None:
    kind, expected, text = case
    small = small_group(cluster, pool, tmp_path)
    with pytest.raises(expected, match=text) as caught:  # and not that of the deadline
        small.run(sw.Worker.raise_on, 1, kind)
    assert "small rank 1 on 127.0.0.1, in raise_on" in str(caught.value)
    if isinstance(caught.value, EngineError):
        assert (caught.value.engine, caught.value.log_tail) == ("engine-3", "its last words")
        assert str(caught.value).count("engine engine-3") == 1
    if isinstance(caught.value, WorkerError):
        assert (caught.value.role, caught.value.rank, caught.value.method) == (
            "small",
            1,
            "raise_on",
        )
        assert "Traceback" in caught.value.log_tail
    small.kill()


@pytest.mark.parametrize("how", ["exit", "sigkill"])
def test_death_of_a_rank_is_reported_rather_than_its_consequences(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path, how: str
) -> None:
    small = small_group(cluster, pool, tmp_path, ranks=3)
    with pytest.raises(WorkerError, match="the worker process died") as caught:
        small.run(sw.Worker.die_on, 1, how)
    assert (caught.value.rank, caught.value.method, caught.value.node) == (1, "die_on", "127.0.0.1")
    assert "famous last words" in caught.value.log_tail
    with pytest.raises(WorkerError, match="died"):  # not another minute of waiting
        small.run(sw.Worker.who)
    pids = small.pids()
    small.kill()
    assert not any(_alive(pid) for pid in pids)


def test_a_hang_ends_at_the_deadline_and_shows_where(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path
) -> None:
    small = small_group(cluster, pool, tmp_path)
    with pytest.raises(WorkerError, match=r"no answer from rank\(s\) 1 of 2") as caught:
        small.run(sw.Worker.hang_on, 1, timeout=4.0)
    assert caught.value.waited_s is not None and 3.9 < caught.value.waited_s < 60
    assert "in hang_on" in caught.value.log_tail  # the stack faulthandler wrote
    small.kill()


def test_processes_that_do_not_come_up_in_time_are_said_not_to_have_come_up(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "config", replace(cluster.config, start_timeout_s=0.05))
    with pytest.raises(
        WorkerError,
        match=r"rank\(s\) 0, 1 of 2 have not started\..* raise cluster\.start_timeout_s",
    ):
        small_group(cluster, pool, tmp_path)


def test_constructor_error_keeps_its_type_and_leaves_no_process(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError,
        match=r"does not divide by 4 heads \(small rank 1 on 127.0.0.1, in BadConstructor.__init__",
    ):
        small_group(cluster, pool, tmp_path, sw.BadConstructor)


def test_data_parallel_call_needs_positions(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path
) -> None:
    small = small_group(cluster, pool, tmp_path, sw.NoMesh, ranks=1)
    with pytest.raises(MeshError, match="mesh_position"):
        small.run(sw.NoMesh.work, batch(2))
    small.kill()


def test_killing_a_group_takes_the_children_with_it(
    cluster: Cluster, pool: ResourcePool, tmp_path: Path
) -> None:
    small = small_group(cluster, pool, tmp_path)
    children = small.run(sw.Worker.start_sleeper)
    pids = [*small.pids(), *children]
    small.kill()
    _wait_for_end(pids, 60)
    with pytest.raises(WorkerError, match="was killed"):
        small.run(sw.Worker.who)


def test_two_groups_run_side_by_side_and_torch_distributed_finds_its_peers(
    cluster: Cluster, pool: ResourcePool, group: WorkerGroup, tmp_path: Path
) -> None:
    gloo = small_group(cluster, pool, tmp_path, sw.GlooWorker)
    busy = group.call(sw.Worker.nap, 9, 0.5)
    assert gloo.run(sw.GlooWorker.total, 5) == [11, 11]
    assert busy.result(timeout=120)[0][-1] == 9
    gloo.kill()


def test_pools_split_and_merge(pool: ResourcePool) -> None:
    first, second = pool.split([1, 3])
    assert (len(first), len(second), [slot.local_rank for slot in second.slots]) == (
        1,
        3,
        [1, 2, 3],
    )
    assert ResourcePool.merge([first, second]) == pool
    with pytest.raises(ResourceError, match="overlap"):
        ResourcePool.merge([first, pool])
    with pytest.raises(ResourceError, match="must add up to"):
        pool.split([1, 1])


def test_a_pool_that_cannot_be_placed_says_what_is_free(
    cluster: Cluster, pool: ResourcePool
) -> None:
    with pytest.raises(
        ResourceError,
        match=r"the pool needs 2 nodes with 1 process each.*127\.0\.0\.1: (\d+) of \1; add",
    ) as told:
        ResourcePool.allocate(cluster, 2, 1)
    assert "after waiting" not in str(told.value)  # a local cluster will not grow
    total = int(cluster.nodes()[0].total["CPU"])
    with pytest.raises(
        ResourceError,
        match=rf"after waiting 1 s: .*127\.0\.0\.1: {total - len(pool)} of {total}; add",
    ):
        ResourcePool.allocate(cluster, 1, total, timeout_s=1)
    ResourcePool.allocate(cluster, 1, total - len(pool), timeout_s=10).release()


def test_everything_listens_on_loopback_only(cluster: Cluster, group: WorkerGroup) -> None:
    assert set(group.pids()) <= {process.pid for process in _cluster_processes(cluster)}
    outside = []
    listening = 0
    for process in [psutil.Process(), *_cluster_processes(cluster)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening += 1
                if connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                    outside.append((process.name(), connection.laddr))
    assert listening >= 6  # gcs, raylet, driver, workers: the test does look at something
    assert not outside


def test_one_cluster_a_process_and_short_socket_paths(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="already running"):
        Cluster.start(CONFIG, tmp_path)
    assert len(str(cluster.temp_dir)) + ROOM_FOR_RAY <= 107  # bytes in the path of a unix socket


def _cluster_processes(cluster: Cluster) -> list[psutil.Process]:
    """Descendants of this process since the cluster's start, and whatever names the cluster's
    temporary folder."""
    found = {
        process.pid: process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in BEFORE
    }
    for process in psutil.process_iter(["cmdline"]):
        if any(str(cluster.temp_dir) in word for word in process.info["cmdline"] or []):
            found[process.pid] = process
    return [process for process in found.values() if _alive(process.pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for_end(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still there after {seconds} s: {left}"
