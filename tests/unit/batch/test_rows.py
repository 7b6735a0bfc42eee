"""Operations on rows of large batches: they give the rows asked for, and few rows do not keep all
in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged


def large(rows: int = 400) -> DataProto:
    """A dense column, a jagged one and one of objects; of sizes that training has."""
    random = np.random.default_rng(3)
    tokens = Jagged.from_lengths(random.integers(0, 9, rows * 500), [500] * rows)
    names = np.array([f"row {i}" for i in range(rows)], dtype=object)
    return DataProto.from_columns({"a": random.random((rows, 600)), "b": tokens, "c": names})


@pytest.mark.slow
@given(data=st.data())
def test_any_sequence_of_operations_gives_the_rows_that_were_asked_for(data: st.DataObject) -> None:
    batch = large()
    want = {name: list(batch[name]) for name in batch.columns}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = len(batch)
        kind = data.draw(st.sampled_from(["reorder", "slice", "pick", "repeat", "concat", "split"]))
        if kind == "reorder":
            index = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(rows)
            batch = batch.reorder(index)
        elif kind == "slice":
            index = np.arange(rows)[data.draw(st.integers(0, 50)) :]
            batch = batch.rows(slice(int(index[0]) if len(index) else rows, None))
        elif kind == "pick":
            index = np.random.default_rng(data.draw(st.integers(0, 99))).integers(
                0, max(rows, 1), rows and data.draw(st.integers(0, rows))
            )
            batch = batch.rows(index)
        elif kind == "repeat":
            index = np.repeat(np.arange(rows), 2)
            batch = batch.repeat(2)
        elif kind == "concat":
            index = np.tile(np.arange(rows), 2)
            batch = DataProto.concat([batch, batch])
        else:
            index = np.arange(rows)
            batch = DataProto.concat(batch.split(101)) if rows else batch
        want = {name: [column[i] for i in index] for name, column in want.items()}
        assert len(batch) == len(index)
        assert batch.lengths("b").tolist() == [len(row) for row in want["b"]]
        if len(batch) > 2000:
            break
    for name, column in want.items():
        assert [np.array_equal(x, y) for x, y in zip(batch[name], column, strict=True)] == [
            True
        ] * len(column)


def test_few_rows_do_not_keep_a_large_batch_in_memory() -> None:
    batch = large()
    few = batch.rows([5, 3, 9])
    assert few["a"].base is None or few["a"].base.nbytes == few["a"].nbytes
    assert few["b"].values.base is None or few["b"].values.base.nbytes == few["b"].values.nbytes
