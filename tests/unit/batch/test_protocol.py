"""DataProto: the algebra of rows and columns, what is refused, and the ways to torch, Arrow,
parquet and other processes."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import (
    DataProto,
    Jagged,
    from_stream,
    from_table,
    read_parquet,
    to_stream,
    to_table,
    write_parquet,
)
from hybridflow.errors import DataError, SchemaError


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 9) -> DataProto:
    rows = draw(st.integers(min_rows, max_rows))
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    total = sum(lengths)
    values = np.asarray(
        draw(st.lists(st.integers(-9, 9), min_size=total, max_size=total)), dtype=np.int32
    )
    scores = np.asarray(
        draw(st.lists(st.floats(width=32), min_size=rows, max_size=rows)), dtype=np.float32
    )
    texts = np.empty(rows, dtype=object)
    texts[:] = draw(st.lists(st.text(max_size=3), min_size=rows, max_size=rows))
    columns = {
        "uid": np.arange(rows),
        "ids": Jagged.from_lengths(values, lengths),
        "wide": Jagged.from_lengths(
            np.arange(total * 2, dtype=np.float16).reshape(total, 2), lengths
        ),
        "scores": scores,
        "grid": np.arange(rows * 6, dtype=np.uint8).reshape(rows, 2, 3),
        "texts": texts,
        "half": np.arange(rows, dtype=np.uint16),
    }
    return DataProto.from_columns(columns, {"step": 3, "names": ["a"]}, bfloat16=["half"])


def small() -> DataProto:
    ids = Jagged.from_rows([[1, 2], [], [3], [4, 5, 6]], np.int64)
    return DataProto.from_columns(
        {"uid": np.arange(4), "ids": ids, "text": np.array(["a", "b", "c", "d"])}, {"t": 1}
    )


def rows_of(batch: DataProto, name: str) -> list[Any]:
    return [np.asarray(row).tolist() for row in batch[name]]


# --- the algebra
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(batches(min_rows=1), st.integers(1, 12))
def test_concat_undoes_split_and_chunk(batch: DataProto, n: int) -> None:
    assert DataProto.concat(batch.split(n)).equals(batch)
    chunks = batch.chunk(n)
    assert DataProto.concat(chunks).equals(batch)
    assert len(chunks) == n and max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert [len(part) for part in batch.split(n)[:-1]] == [n] * (len(batch.split(n)) - 1)


@pytest.mark.slow
@given(batches(), st.integers(1, 7))
def test_unpad_undoes_pad_and_padding_is_cyclic(batch: DataProto, n: int) -> None:
    padded, added = batch.pad_to_divisor(n)
    assert len(padded) % n == 0 and 0 <= added < n
    assert padded.unpad(added).equals(batch)
    assert padded["uid"].tolist() == [i % len(batch) for i in range(len(padded))]


@pytest.mark.slow
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_with_the_inverse_gives_the_rows_back(batch: DataProto, random: Any) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = batch.reorder(order)
    assert shuffled["uid"].tolist() == order
    assert rows_of(shuffled, "ids") == [rows_of(batch, "ids")[i] for i in order]
    assert shuffled.reorder(np.argsort(order)).equals(batch)


@pytest.mark.slow
@given(batches(), st.integers(1, 4))
def test_repeat_is_interleaved_and_every_nth_row_is_the_original(batch: DataProto, n: int) -> None:
    repeated = batch.repeat(n)
    assert repeated["uid"].tolist() == [i for i in range(len(batch)) for _ in range(n)]
    for k in range(n):
        assert repeated.rows(slice(k, None, n)).equals(batch)


@pytest.mark.slow
@given(batches(), st.data())
def test_rows_agree_with_numpy_for_every_kind_of_index(
    batch: DataProto, data: st.DataObject
) -> None:
    size = len(batch)
    bounds = st.one_of(st.none(), st.integers(-12, 12))
    cut = slice(
        data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1, -2]))
    )
    index = data.draw(st.lists(st.integers(-size, size - 1), max_size=8)) if size else []
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    for key in (cut, index, np.asarray(mask, dtype=bool)):
        expected = np.arange(size)[
            np.asarray(key, dtype=np.int64) if isinstance(key, list) else key
        ]
        got = batch.rows(key)
        assert got["uid"].tolist() == expected.tolist()
        assert rows_of(got, "wide") == [rows_of(batch, "wide")[i] for i in expected]
        assert got["texts"].tolist() == [batch["texts"][i] for i in expected]


@pytest.mark.slow
@given(batches(), st.sampled_from([1, 2]))
def test_select_and_union_give_the_batch_back(batch: DataProto, overlap: int) -> None:
    names = batch.columns
    left = batch.select(names[:4])
    right = batch.select(names[4 - overlap :])
    whole = left.union(right)
    assert whole.columns == names
    assert whole.equals(batch)
    assert batch.drop(names[:4]).columns == names[4:]


@pytest.mark.slow
@given(batches())
def test_rename_there_and_back(batch: DataProto) -> None:
    renamed = batch.rename({"half": "uid2", "uid": "half2"})
    assert renamed.columns[0] == "half2" and renamed.bfloat16 == {"uid2"}
    assert renamed.rename({"uid2": "half", "half2": "uid"}).equals(batch)


# --- the ways out and back
# ----------------------------------------------------------------------------------


@pytest.mark.slow
@given(batches())
def test_table_and_pickle_round_trips(batch: DataProto) -> None:
    assert from_table(to_table(batch)).equals(batch)
    part = batch.rows(slice(1, -1))
    assert from_table(to_table(part)).equals(part)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(data, buffers=buffers).equals(part)
    assert pickle.loads(pickle.dumps(part)).equals(part)


def test_pickling_a_slice_sends_its_own_bytes_out_of_band() -> None:
    values = np.zeros(1_000_000, dtype=np.float32)
    batch = DataProto.from_columns(
        {"x": values.reshape(1000, 1000), "j": Jagged.from_lengths(values, [1000] * 1000)}
    )
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch.rows(slice(10, 20)), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 2000
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [88, 40_000, 40_000]


def test_slices_share_memory_and_permutations_do_not() -> None:
    batch = DataProto.from_columns(
        {"x": np.zeros((10, 5)), "j": Jagged.from_lengths(np.zeros(50), [5] * 10)}
    )
    for part in (
        batch.rows(slice(2, 5)),
        batch.rows(3),
        batch.chunk(2)[1],
        batch.split(4)[1],
        batch.rows([4, 5, 6]),
    ):
        assert np.shares_memory(part["x"], batch["x"]) and np.shares_memory(
            part["j"].values, batch["j"].values
        )
        assert part["j"].offsets[0] == 0
    assert not np.shares_memory(batch.rows([5, 4])["x"], batch["x"])


def test_parquet_round_trip_keeps_objects_types_and_meta(tmp_path: Path) -> None:
    objects = np.empty(3, dtype=object)
    for i, value in enumerate([{"index": 1, "tags": ["x"]}, [1, 2], [3, 4]]):
        objects[i] = value
    texts = np.asarray(["a", None, "c"], dtype=object)
    flags = Jagged.from_rows([[True], [], [False, True]], bool)
    batch = DataProto.from_columns(
        {"extra": objects, "text": texts, "flags": flags}, {"version": [1, 2]}
    )
    write_parquet(tmp_path / "new" / "a.parquet", batch)
    assert read_parquet(tmp_path / "new" / "a.parquet").equals(batch)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.parquet"]


def test_tables_of_others_are_read_by_type() -> None:
    table = pa.table(
        {
            "prompt": [[{"role": "user"}], []],
            "ids": [[1, 2], [3]],
            "score": [0.5, 1.0],
            "who": ["a", "b"],
        }
    )
    table = table.append_column("kind", pa.array(["x", "y"]).dictionary_encode())
    batch = from_table(pa.concat_tables([table, table]))
    assert isinstance(batch["ids"], Jagged) and rows_of(batch, "ids") == [[1, 2], [3], [1, 2], [3]]
    assert batch["score"].dtype == np.float64 and batch["kind"].tolist() == ["x", "y"] * 2
    assert batch["prompt"].tolist() == [[{"role": "user"}], []] * 2


@pytest.mark.parametrize("cut", [0, 4, 200, -1])
def test_damaged_parquet_is_a_data_error_naming_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "b.parquet"
    write_parquet(path, small())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"b\.parquet: not a readable parquet file"):
        read_parquet(path)


def test_flipped_bytes_never_load_as_something_else_than_an_error_or_a_batch(
    tmp_path: Path,
) -> None:
    write_parquet(tmp_path / "a.parquet", small())
    good = (tmp_path / "a.parquet").read_bytes()
    random = np.random.default_rng(0)
    failures = 0
    for _ in range(60):
        bad = bytearray(good)
        bad[random.integers(4, len(bad) - 4)] ^= 0xFF
        (tmp_path / "b.parquet").write_bytes(bad)
        try:
            read_parquet(tmp_path / "b.parquet")
        except DataError as error:
            failures += 1
            assert "b.parquet" in str(error)
    assert failures > 5


def test_missing_file_and_missing_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.parquet"):
        read_parquet(tmp_path / "nothing.parquet")
    pq.write_table(pa.table({"score": [1.0, None]}), tmp_path / "c.parquet")
    with pytest.raises(SchemaError, match=r"c\.parquet.*'score' has 1 missing"):
        read_parquet(tmp_path / "c.parquet")


def test_objects_without_a_json_form_are_named() -> None:
    with pytest.raises(SchemaError, match="column 'o', row 0"):
        to_table(DataProto.from_columns({"o": np.asarray([{1, 2}], dtype=object)}))


def test_torch_views_share_memory_and_do_not_warn() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    batch = DataProto.from_columns({"x": x, "ids": small()["ids"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = batch.torch("x")
        values, offsets = batch.torch("ids")
    assert tensor.data_ptr() == x.ctypes.data and tensor.tolist() == x.tolist()
    assert values.tolist() == [1, 2, 3, 4, 5, 6] and offsets.tolist() == [0, 2, 2, 3, 6]
    assert batch.rows(slice(None, None, -1)).torch("x").tolist() == x[::-1].tolist()
    with pytest.raises(SchemaError, match="cannot be converted to a tensor"):
        small().torch("text")


def test_torch_view_outlives_the_batch() -> None:
    tensor = DataProto.from_columns({"x": np.full(100_000, 7.0)}).torch("x")
    junk = [np.zeros(100_000) for _ in range(20)]
    assert len(junk) == 20 and bool((tensor == 7).all())


@pytest.mark.slow
@given(batches(min_rows=2))
def test_bfloat16_survives_everything(batch: DataProto) -> None:
    weights = torch.randn(len(batch), 3).bfloat16()
    values = torch.randn(int(batch["ids"].offsets[-1])).bfloat16()
    offsets = batch.torch("ids")[1]
    tagged = batch.with_torch(w=weights, j=(values, offsets))
    there = pickle.loads(pickle.dumps(DataProto.concat(from_table(to_table(tagged)).split(1))))
    assert there.torch("w").dtype == torch.bfloat16 and torch.equal(there.torch("w"), weights)
    assert torch.equal(there.torch("j")[0], values)
    assert there.with_columns(w=np.zeros(len(batch))).bfloat16 == {"half", "j"}


# --- what is refused
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ([1, 2, 3, 4], "'bad' must be a numpy array or Jagged, got list"),
        (np.zeros(4, dtype=complex), "'bad' has unsupported dtype complex128"),
        (np.zeros((), dtype=int), "'bad' must be dense"),
        (np.empty((4, 2), dtype=object), "'bad' must be dense"),
        (np.zeros(3), "'bad': 3"),
        (np.zeros(4, dtype="datetime64[s]"), "'bad' has unsupported dtype datetime64"),
    ],
)
def test_bad_columns_are_named(column: Any, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        DataProto.from_columns({"uid": np.arange(4), "bad": column})
    assert text in str(caught.value)
    with pytest.raises(SchemaError, match="bad"):
        small().with_columns(bad=column)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [], [0.0, 3.0], [[0, 3]]])
def test_offsets_must_fit_the_values(offsets: list[Any]) -> None:
    with pytest.raises(SchemaError, match="offsets"):
        Jagged(np.arange(3), np.asarray(offsets))


def test_union_refuses_unequal_duplicates_and_lengths() -> None:
    batch = small()
    other = batch.with_columns(ids=Jagged.from_rows([[1, 2], [], [3], [4, 5, 7]], np.int64))
    with pytest.raises(SchemaError, match="column 'ids' is in both"):
        batch.union(other)
    with pytest.raises(SchemaError, match="column 'uid' is in both"):
        batch.union(batch.with_columns(uid=np.arange(4, dtype=np.int32)))
    with pytest.raises(SchemaError, match="meta 't' is 1 in one part and 2"):
        batch.union(batch.with_meta(t=2))
    with pytest.raises(SchemaError, match="rows, got 4 and 3"):
        batch.union(batch.rows(slice(3)))
    nan = DataProto.from_columns({"x": np.asarray([np.nan])})
    assert nan.union(nan).equals(nan)


def test_union_compares_objects_that_hold_arrays() -> None:
    def of(value: Any) -> DataProto:
        column = np.empty(1, dtype=object)
        column[0] = {"a": [np.arange(2), value]}
        return DataProto.from_columns({"o": column})

    assert of(1.5).union(of(1.5)).equals(of(1.5))
    with pytest.raises(SchemaError, match="'o'"):
        of(1.5).union(of(2.5))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.drop(["ids"]), "part 1 and part 0 differ in column 'ids'"),
        (
            lambda b: b.with_columns(uid=np.zeros(4)),
            "column 'uid' is dense int64 [] in part 0 and dense float64 [] in part 1",
        ),
        (lambda b: b.with_columns(ids=np.zeros(4)), "column 'ids' is jagged int64"),
        (
            lambda b: b.with_columns(uid=np.zeros((4, 2), dtype=np.int64)),
            "dense int64 [2] in part 1",
        ),
        (lambda b: b.with_meta(t=5), "meta 't'"),
    ],
)
def test_concat_names_what_differs(change: Any, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        DataProto.concat([small(), change(small())])
    assert text in str(caught.value)


@pytest.mark.parametrize("index", [4, -5, [0, 9], [0.5], [[1]], [True, False]])
def test_bad_row_indices(index: Any) -> None:
    with pytest.raises(SchemaError):
        small().rows(index)


def test_other_refusals_name_the_column() -> None:
    batch = small()
    for call in (
        lambda: batch["x"],
        lambda: batch.select(["x"]),
        lambda: batch.drop(["x"]),
        lambda: batch.rename({"x": "y"}),
    ):
        with pytest.raises(SchemaError, match="no column 'x'; the columns are uid, ids, text"):
            call()
    with pytest.raises(SchemaError, match="two columns named 'ids'"):
        batch.rename({"uid": "ids"})
    with pytest.raises(SchemaError, match="permutation"):
        batch.reorder([0, 0, 1, 2])
    with pytest.raises(SchemaError, match="meta 'm' is not JSON-serializable"):
        batch.with_meta(m=np.float32(1))
    with pytest.raises(SchemaError, match="'uid' is tagged bfloat16"):
        DataProto.from_columns({"uid": np.arange(4)}, bfloat16=["uid"])
    with pytest.raises(SchemaError):
        batch.unpad(5)
    with pytest.raises(SchemaError):
        DataProto.concat([])
    with pytest.raises(SchemaError, match="'ids' must be dense here"):
        batch.dense("ids")
    with pytest.raises(SchemaError, match="'uid' must be jagged here, got a int64 array"):
        batch.jagged("uid")


def test_nothing_can_be_changed_in_place() -> None:
    x = np.arange(4)
    batch = DataProto.from_columns({"x": x, "ids": small()["ids"]}, {"t": 1})
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        batch["ids"].values[0] = 1
    with pytest.raises(TypeError):
        batch.meta["t"] = 2  # type: ignore[index]
    with pytest.raises(AttributeError, match="immutable"):
        batch.extra = 1  # type: ignore[attr-defined]
    x[0] = 5  # the caller's own array stays writable
    assert batch.with_columns(x=np.zeros(4))["x"][0] == 0 and batch["x"][0] == 5


def test_printed_form_tells_shapes_and_bytes() -> None:
    text = repr(small().with_torch(h=torch.zeros(4, 2).bfloat16()))
    assert "DataProto: 4 rows, 4 columns" in text
    assert "int64 jagged [4, 0..3 (mean 1.5)]  88 B" in text
    assert "bfloat16 [4, 2]  16 B" in text


def _streamed() -> DataProto:
    return DataProto.from_columns(
        {
            "ids": Jagged.from_rows([[1, 2], [], [3]], np.int64),
            "x": np.arange(6, dtype=np.float32).reshape(3, 2),
            "half": np.zeros(3, np.uint16),
            "info": np.array([{"a": 1}, "text", None], dtype=object),
        },
        {"temperature": 0.5},
        bfloat16=["half"],
    )


def test_a_stream_brings_back_the_same_batch():
    assert from_stream(to_stream(_streamed())).equals(_streamed())
    empty = _streamed().rows(slice(0, 0))
    assert from_stream(memoryview(to_stream(empty))).equals(empty)


def test_a_stream_that_is_cut_off_anywhere_is_refused():
    data = to_stream(_streamed())
    for end in range(0, len(data), 7):
        with pytest.raises(DataError, match="Arrow stream"):
            from_stream(data[:end])


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_stream_is_refused_wherever_the_damage_is(position, change):
    data = bytearray(to_stream(_streamed()))
    data[position % len(data)] ^= change
    with pytest.raises(
        DataError, match=rf"of {len(data)} bytes|^{len(data)} bytes are not a complete Arrow stream"
    ):
        from_stream(bytes(data))


def test_a_stream_of_somebody_else_is_read_and_may_read_ours():
    table = to_table(_streamed())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert from_stream(sink.getvalue().to_pybytes()).equals(_streamed())
    assert pa.ipc.open_stream(to_stream(_streamed())).read_all().equals(table)
