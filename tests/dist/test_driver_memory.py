"""The driver works through a batch of token columns (metrics, scores, dump) without ever holding
one: they stay in the object store."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ClusterConfig
from hybridflow.observe.rollouts import dump_path, read_rollouts
from hybridflow.rollout.evaluation import dump_batch
from hybridflow.single_controller import Cluster, keep_in_store
from hybridflow.trainer.metrics import batch_metrics, kl_sums, log_prob_difference

pytestmark = pytest.mark.slow
ROWS = 512
TOKENS = 12_000
COLUMNS = (
    "response_ids",
    "response_versions",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "entropys",
    "advantages",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(
        ClusterConfig(start_timeout_s=90, object_store_bytes=512 << 20),
        tmp_path_factory.mktemp("run"),
    ) as started:
        yield started


class Peak:
    """The most that this process has allocated for itself while inside, as Python, numpy and Arrow
    count it. Resident memory would also depend on the allocator and on the size of pages."""

    def __enter__(self) -> Peak:
        self._before = pa.default_memory_pool()
        self._arrow = pa.proxy_memory_pool(self._before)
        pa.set_memory_pool(self._arrow)
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pa.set_memory_pool(self._before)
        self.growth = traced + (self._arrow.max_memory() or 0)


def objects(value: Any) -> np.ndarray:
    made = np.empty(ROWS, dtype=object)
    made[:] = [value] * ROWS
    return made


def finished_batch() -> DataProto:
    """What a step ends with, token columns in the store."""
    lengths = np.full(ROWS, TOKENS)
    values = {
        name: np.random.default_rng(i).random(ROWS * TOKENS, np.float32)
        for i, name in enumerate(COLUMNS)
    }
    values |= {
        name: values[name].astype(np.int64) for name in ("response_ids", "response_versions")
    }
    values["response_mask"] = np.ones(ROWS * TOKENS, np.bool_)
    tokens = {name: Jagged.from_lengths(column, lengths) for name, column in values.items()}
    plain = {
        "data_source": objects("toy"),
        "ground_truth": objects("1"),
        "extra_info": objects({}),
        "response_text": objects("x"),
    }
    plain |= {"finish_reason": objects("stop"), "weight_version": objects("1")}
    prompts = Jagged.from_lengths(np.zeros(ROWS, np.int64), np.ones(ROWS, np.int64))
    numbers = {
        "scores": np.zeros(ROWS, np.float32),
        "rewards": np.zeros(ROWS, np.float32),
        "uid": np.arange(ROWS),
        "prompt_ids": prompts,
    }
    return keep_in_store(DataProto.from_columns({**tokens, **plain, **numbers}))


class Letters:
    def decode(self, ids: list[int]) -> str:
        return str(ids)


def test_metrics_and_dump_hold_a_small_part_of_the_batch_at_a_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    batch = finished_batch()
    assert set(batch.deferred) == {*COLUMNS, "response_mask"}
    shuffled = batch.reorder(np.random.default_rng(0).permutation(ROWS))
    size = batch.nbytes
    assert size > 150 << 20
    letters: Any = Letters()
    # imports and allocates what a first dump does
    dump_batch(tmp_path, 0, batch.rows(slice(0, 2)), letters)
    with Peak() as peak:
        for one in (batch, shuffled):
            log_prob_difference(one)
            batch_metrics(one)
            dump_batch(tmp_path, 1, one, letters)
    assert peak.growth < 0.2 * size, f"{peak.growth >> 20} MiB of {size >> 20} MiB"
    whole = batch.fetch()
    difference = np.abs(whole["rollout_log_probs"].values - whole["old_log_probs"].values)
    mean, largest = log_prob_difference(shuffled)
    assert (
        mean == pytest.approx(difference.mean(dtype=np.float64), rel=1e-9)
        and largest == difference.max()
    )
    metrics = batch_metrics(shuffled)
    assert metrics["actor/entropy"] == pytest.approx(
        whole["entropys"].values.mean(dtype=np.float64), rel=1e-9
    )
    assert metrics["critic/advantages/max"] == whole["advantages"].values.max()
    sums = (
        (whole["old_log_probs"].values.astype(np.float64) - whole["ref_log_probs"].values)
        .reshape(ROWS, -1)
        .sum(1)
    )
    np.testing.assert_allclose(kl_sums(batch), sums, atol=2e-3)
    rows = read_rollouts(dump_path(tmp_path, 1))
    assert [row["uid"] for row in rows] == shuffled["uid"].tolist()
    per_row = difference.reshape(ROWS, -1)[shuffled["uid"]]
    np.testing.assert_allclose(
        [row["logprob_diff_mean"] for row in rows], per_row.mean(1), rtol=1e-5
    )
