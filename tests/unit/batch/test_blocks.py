"""Columns in blocks behave as the joined column does, and share memory with their blocks wherever they can."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged
from hybridflow.batch.blocks import Blocks, for_each
from hybridflow.errors import SchemaError


def dense(sizes: list[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *sizes])
    return [np.arange(a, b)[:, None] * [1, 10] for a, b in pairwise(ends)]


def jagged(sizes: list[int]) -> list[Jagged]:
    ends = np.cumsum([0, *sizes])
    return [Jagged.from_rows([np.full(i % 4, i) for i in range(a, b)], np.int64) for a, b in pairwise(ends)]


def both(sizes: list[int]) -> tuple[DataProto, DataProto]:
    """A batch in blocks, and the same joined."""
    apart = DataProto({"a": Blocks.of(dense(sizes)), "b": Blocks.of(jagged(sizes))}, {})
    return apart, DataProto.from_columns({"a": np.concatenate(dense(sizes)), "b": Jagged.concat(jagged(sizes))})


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
def test_every_operation_on_rows_gives_what_it_gives_on_the_joined_batch(sizes: list[int], data: st.DataObject) -> None:
    apart, whole = both(sizes)
    rows = sum(sizes)
    assert apart.equals(whole) and apart.fetch().equals(whole) and len(apart) == rows
    assert apart.lengths("b").tolist() == whole.lengths("b").tolist()
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    index = data.draw(st.lists(st.integers(0, rows - 1), max_size=40)) if rows else []
    assert apart.rows(slice(start, stop)).equals(whole.rows(slice(start, stop)))
    assert apart.rows(index).equals(whole.rows(index))
    assert DataProto.concat([apart, whole, apart]).equals(DataProto.concat([whole, whole, whole]))
    assert [part.fetch().equals(other) for part, other in zip(apart.split(3), whole.split(3), strict=True)] == [
        True
    ] * -(-rows // 3)
    assert np.array_equal(np.concatenate(apart.blocks("a")), whole["a"])
    assert np.array_equal(np.concatenate([tensor.numpy() for tensor in apart.torch_blocks("a")]), whole["a"])
    for i in range(rows):
        assert apart.rows(i).equals(whole.rows(i))


def test_rows_and_pieces_and_tensors_inside_a_block_are_views() -> None:
    first, second = dense([4, 6])
    batch = DataProto({"a": Blocks.of([first, second])}, {})
    assert np.shares_memory(batch.rows(5)["a"], second)
    assert np.shares_memory(batch.rows(slice(0, 3))["a"], first)
    tensors = zip(batch.torch_blocks("a"), (first, second), strict=True)
    assert [np.shares_memory(tensor.numpy(), block) for tensor, block in tensors] == [True, True]
    across = batch.rows(slice(2, 8)).blocks("a")
    assert [np.shares_memory(block, source) for block, source in zip(across, (first, second), strict=True)] == [
        True,
        True,
    ]
    for block in batch.blocks("a") + batch.rows(slice(2, 8)).blocks("a"):
        with pytest.raises(ValueError, match="read-only"):
            block[0] = 1


def test_blocks_of_bfloat16_keep_their_tag() -> None:
    bits = [np.arange(3, dtype=np.uint16), np.arange(2, dtype=np.uint16)]
    batch = DataProto({"w": Blocks.of(bits)}, {}, ("w",))
    assert [str(tensor.dtype) for tensor in batch.torch_blocks("w")] == ["torch.bfloat16"] * 2
    assert batch.fetch().bfloat16 == {"w"}


def test_blocks_of_different_types_are_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"column 'a' has blocks of different types: dense int64 \[2\], dense int64 \[\]"
    ):
        DataProto({"a": Blocks.of([dense([2])[0], np.arange(2)])}, {})


def test_many_bytes_are_copied_by_threads_with_the_same_result() -> None:
    columns = {name: np.random.default_rng(i).integers(0, 9, (1000, 700)) for i, name in enumerate("abc")}
    batch = DataProto.from_columns(columns)
    order = np.random.default_rng(9).permutation(1000)
    assert batch.nbytes > 16 << 20
    moved = batch.reorder(order)
    assert all(np.array_equal(moved[name], values[order]) for name, values in columns.items())
    assert DataProto.concat(batch.split(100)).equals(batch)


def test_an_error_in_a_thread_is_the_error_of_the_call() -> None:
    def fail(value: int) -> int:
        raise SchemaError(f"column {value}")

    with pytest.raises(SchemaError, match="column 1"):
        for_each(fail, {"a": 1, "b": 2}, 1 << 30)


def large(rows: int = 400) -> DataProto:
    """A dense column, a jagged one and one of objects; the first two are above the size from which copies wait."""
    random = np.random.default_rng(3)
    tokens = Jagged.from_lengths(random.integers(0, 9, rows * 500), [500] * rows)
    names = np.array([f"row {i}" for i in range(rows)], dtype=object)
    return DataProto.from_columns({"a": random.random((rows, 600)), "b": tokens, "c": names})


@given(data=st.data())
def test_rows_that_are_picked_later_are_the_rows_that_were_asked_for(data: st.DataObject) -> None:
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
        joined = DataProto.from_columns({name: batch[name] for name in batch.columns}).nbytes
        assert 0 <= batch.nbytes - joined <= 8 * 64, "only blocks' own offsets may come on top"
        if len(batch) > 2000:
            break
    for name, column in want.items():
        assert [np.array_equal(x, y) for x, y in zip(batch[name], column, strict=True)] == [True] * len(column)


def test_a_new_order_copies_nothing_until_it_is_read_and_then_once() -> None:
    batch = large()
    order = np.random.default_rng(1).permutation(len(batch))
    tracemalloc.start()
    try:
        moved = batch.reorder(order)
        together = DataProto.concat([moved.select(["a"]), batch.select(["a"])])
        pieces = moved.chunk(2)
        assert tracemalloc.get_traced_memory()[0] < 200_000 + together["a"].nbytes
    finally:
        tracemalloc.stop()
    assert "dense" not in repr(moved) and "400" in repr(moved)
    assert moved["a"] is moved["a"] and moved["b"] is moved["b"] and together["a"] is together["a"]
    assert np.array_equal(pieces[1]["a"], batch["a"][order[200:]])
    with pytest.raises(ValueError, match="read-only"):
        moved["a"][0] = 1
    sent: DataProto = pickle.loads(pickle.dumps(moved))
    assert sent.equals(moved) and np.array_equal(sent["a"], batch["a"][order])


def test_few_rows_do_not_keep_a_large_batch_in_memory() -> None:
    batch = large()
    few = batch.rows([5, 3, 9])
    assert few["a"].base is None or few["a"].base.nbytes == few["a"].nbytes
    assert few["b"].values.base is None or few["b"].values.base.nbytes == few["b"].values.nbytes
