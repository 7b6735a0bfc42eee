"""Columns that stay in the object store: what a data-parallel call writes is passed on by reference
and fetched when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged, read_parquet, write_parquet
from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import SchemaError
from hybridflow.single_controller import (
    Cluster,
    ResourcePool,
    WorkerGroup,
    colocated,
    keep_in_store,
)
from tests.dist.harness import sc_workers as sw

pytestmark = pytest.mark.slow
CONFIG = ClusterConfig(nodes=1, procs_per_node=4, start_timeout_s=90, call_timeout_s=60)
TOKENS = 3000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(CONFIG, tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.fixture(scope="module")
def groups(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[WorkerGroup, WorkerGroup]:
    """One group of two data-parallel ranks, and one of two data-parallel groups of two ranks, in
    one pool."""
    pool = ResourcePool.allocate(cluster, 1, 4)
    logs = tmp_path_factory.mktemp("logs")
    wide = WorkerGroup(cluster, pool, sw.Tokens, role="wide", args=(2,), log_dir=logs)
    narrow = WorkerGroup(
        cluster, pool.split([3, 1])[0], sw.Tokens, role="narrow", args=(1,), log_dir=logs
    )
    return wide, narrow


def prompts(rows: int) -> DataProto:
    return DataProto.from_columns({"uid": np.arange(rows)})


@pytest.mark.parametrize("rows", [4, 7, 12])
def test_large_columns_stay_in_the_store_and_read_like_others(
    groups: tuple[WorkerGroup, WorkerGroup], rows: int
) -> None:
    out = groups[0].run(sw.Tokens.generate, prompts(rows))
    assert out.deferred == ("tokens",)  # uid and weight are small enough to be brought here
    assert out["uid"].tolist() == list(range(rows))
    assert out.lengths("tokens").tolist() == [TOKENS - uid for uid in range(rows)]
    tokens = out.jagged("tokens")
    assert [int(row[0]) for row in tokens] == list(range(rows))
    assert not tokens.values.flags.writeable
    assert out["weight"].dtype == np.uint16 and "weight" in out.bfloat16
    assert "in the object store" in repr(out)


@pytest.mark.parametrize("rows", [3, 8, 11])
def test_a_batch_of_references_is_cut_reordered_and_sent_to_another_group(
    groups: tuple[WorkerGroup, WorkerGroup], rows: int
) -> None:
    wide, narrow = groups
    out = prompts(rows).union(wide.run(sw.Tokens.generate, prompts(rows)))
    order = np.random.default_rng(0).permutation(rows)
    for group in (narrow, wide):
        back = group.run(sw.Tokens.sums, out.reorder(order)).reorder(np.argsort(order))
        assert back["uid"].tolist() == list(range(rows))
        assert back["total"].tolist() == [uid * (TOKENS - uid) for uid in range(rows)]
    part = out.rows([1, 1, 0])
    assert narrow.run(sw.Tokens.sums, part)["uid"].tolist() == [1, 1, 0]
    assert DataProto.concat([part, out]).jagged("tokens").lengths[:3].tolist() == [
        TOKENS - 1,
        TOKENS - 1,
        TOKENS,
    ]
    assert out.fetch().equals(out)


def test_futures_of_two_groups_run_at_the_same_time(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    wide, narrow = groups
    out = wide.run(sw.Tokens.generate, prompts(9))
    slow = wide.call(sw.Tokens.generate, prompts(9), 3.0)
    sums = narrow.call(sw.Tokens.sums, out)
    assert sums.result(timeout=120)["total"].tolist() == [uid * (TOKENS - uid) for uid in range(9)]
    assert not slow.done()
    assert slow.result()["uid"].tolist() == list(range(9))


def test_missing_and_undeclared_columns_are_named(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    with pytest.raises(SchemaError, match="did not return column 'b'"):
        groups[0].run(sw.Tokens.wrong_columns, prompts(4))


def test_references_are_given_back_with_the_batch(
    groups: tuple[WorkerGroup, WorkerGroup], cluster: Cluster
) -> None:
    for _ in range(40):  # 40 x 12 MB in a store of 256 MB
        out = groups[0].run(sw.Tokens.generate, prompts(500))
        assert out.deferred == ("tokens",)
    assert out.jagged("tokens").nbytes > 10 << 20


def test_jagged_rows_survive_a_pickle_of_a_batch_of_references(
    groups: tuple[WorkerGroup, WorkerGroup], tmp_path: Path
) -> None:
    out = groups[0].run(sw.Tokens.generate, prompts(5))
    write_parquet(tmp_path / "a.parquet", out.drop(["weight"]))
    assert isinstance(read_parquet(tmp_path / "a.parquet")["tokens"], Jagged)


def test_two_roles_in_one_process_are_called_through_their_own_classes(
    cluster: Cluster, tmp_path: Path
) -> None:
    pool = ResourcePool.allocate(cluster, 1, 2)
    roles = colocated(counter=sw.Counter, tokens=sw.Tokens)
    both = WorkerGroup(cluster, pool, roles, role="both", args=((40,), (2,)), log_dir=tmp_path)
    assert both.run(sw.Counter.next) == [41, 41]
    assert both.run(sw.Tokens.generate, prompts(5))["uid"].tolist() == list(range(5))
    assert both.run(sw.Counter.next) == [42, 42]
    with pytest.raises(TypeError, match=r"both: Worker\.who is not a method of counter, tokens"):
        both.run(sw.Worker.who)
    both.kill()
    pool.release()


def test_fetched_rows_of_one_rank_are_views_of_the_store(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    out = groups[0].run(sw.Tokens.generate, prompts(6))
    assert out.fetch().deferred == ()
    one = out.rows(slice(3, 6)).jagged("tokens")
    assert (
        one.lengths.tolist() == [TOKENS - 3, TOKENS - 4, TOKENS - 5]
        and not one.values.flags.owndata
    )
    assert out.rows([5, 0, 3]).jagged("tokens").lengths.tolist() == [TOKENS - 5, TOKENS, TOKENS - 3]
    assert groups[1].run(sw.Tokens.sums, out.fetch())["total"].tolist() == [
        uid * (TOKENS - uid) for uid in range(6)
    ]


def test_columns_share_an_object_on_one_node_and_have_their_own_elsewhere(
    cluster: Cluster, groups: tuple[WorkerGroup, WorkerGroup], tmp_path: Path
) -> None:
    pool = ResourcePool.allocate(cluster, 1, 1)
    joined = Cluster(cluster.config, tmp_path, None)  # as one that this driver did not start
    joined._watch.stop()  # the fixture's cluster is watched already
    apart = WorkerGroup(joined, pool, sw.Tokens, role="apart", args=(1,), log_dir=tmp_path)
    made = [group.call(sw.Tokens.generate, prompts(6)) for group in (groups[0], apart)]
    assert [[len(set(refs.values())) for refs in future._stored.values()] for future in made] == [
        [1, 1],
        [3],
    ]
    whole = DataProto.concat([future.result().rename({"tokens": "others"}) for future in made])
    assert whole.jagged("others").lengths.tolist() == [TOKENS - uid for uid in range(6)] * 2
    back = groups[1].run(
        sw.Tokens.sums, whole.rename({"others": "tokens"}).reorder(np.arange(12)[::-1])
    )
    assert back["total"].tolist() == [uid * (TOKENS - uid) for uid in range(6)][::-1] * 2
    apart.kill()
    pool.release()


def test_columns_of_the_driver_are_stored_once_and_sent_by_reference(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    rows = Jagged.from_rows([np.full(TOKENS - uid, uid) for uid in range(8)], np.int64)
    kept = keep_in_store(prompts(8).with_columns(tokens=rows))
    assert kept.deferred == ("tokens",) and kept.lengths("tokens").tolist() == rows.lengths.tolist()
    for group in groups:
        assert group.run(sw.Tokens.sums, kept)["total"].tolist() == [
            uid * (TOKENS - uid) for uid in range(8)
        ]
    assert keep_in_store(kept).fetch()["tokens"].equals(rows)
