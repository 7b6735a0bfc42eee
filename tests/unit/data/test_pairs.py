"""Preference pairs: what the arithmetic task writes, what the dataset makes of it and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.batch import DataProto
from hybridflow.config.schema import DataConfig
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.prepare import prepare
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, DataError

OPTIONS = {"max_operand": 12, "num_test": 20, "num_pairs": 300, "zero_pad": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("arithmetic", tmp_path_factory.mktemp("pairs") / "data", None, OPTIONS).folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return pq.ParquetFile(file).read().to_pylist()


def refused(
    folder: Path, tmp_path: Path, match: str, config: DataConfig | None = None, **row: str
) -> None:
    row = {"chosen": "12", "rejected": "13", **row}
    pq.write_table(
        pa.Table.from_pylist([{"prompt": [{"role": "user", "content": "1"}], **row}]),
        tmp_path / "bad.parquet",
    )
    with pytest.raises(DataError, match=match):
        PreferenceDataset(
            [tmp_path / "bad.parquet"], load_tokenizer(folder / "tokenizer"), config or DataConfig()
        )


def test_one_answer_is_right_and_the_other_is_not(folder: Path) -> None:
    pairs = rows_of(folder / "pairs.parquet")
    held_out = rows_of(folder / "pairs_test.parquet")
    assert (len(pairs), len(held_out)) == (300, 20)
    for row in pairs + held_out:
        a, b = map(int, row["prompt"][0]["content"].split("+"))
        assert int(row["chosen"]) == a + b != int(row["rejected"])
        assert len(row["chosen"]) == len(row["rejected"]) == 2
    questions = {row["prompt"][0]["content"] for row in held_out}
    assert not questions & {row["prompt"][0]["content"] for row in pairs}
    assert questions == {row["prompt"][0]["content"] for row in rows_of(folder / "test.parquet")}


def test_near_errors_move_digits_by_one_or_two(tmp_path: Path) -> None:
    rows = rows_of(
        prepare("arithmetic", tmp_path / "data", None, {**OPTIONS, "pair_errors": "near"}).folder
        / "pairs.parquet"
    )
    moved = [
        (int(w) - int(r)) % 10
        for row in rows
        for r, w in zip(row["chosen"], row["rejected"], strict=True)
    ]
    assert set(moved) == {0, 1, 2, 8, 9} and moved.count(0) < len(moved) / 2
    assert all(row["chosen"] != row["rejected"] for row in rows)
    with pytest.raises(ConfigError, match=r"pair_errors: got 'far', choose one of: any, near"):
        prepare("arithmetic", tmp_path / "wrong", None, {**OPTIONS, "pair_errors": "far"})


def test_pairs_are_as_many_as_asked_for_and_the_same_every_time(
    folder: Path, tmp_path: Path
) -> None:
    again = prepare("arithmetic", tmp_path / "data", None, OPTIONS).folder
    assert rows_of(again / "pairs.parquet") == rows_of(folder / "pairs.parquet")
    other = prepare("arithmetic", tmp_path / "other", None, {**OPTIONS, "seed": 2}).folder
    assert rows_of(other / "pairs.parquet") != rows_of(folder / "pairs.parquet")
    without = prepare("arithmetic", tmp_path / "without", None, {**OPTIONS, "num_pairs": 0}).folder
    assert not (without / "pairs.parquet").exists()
    with pytest.raises(ConfigError, match=r"num_pairs=-1 must be at least 0"):
        prepare("arithmetic", tmp_path / "wrong", None, {**OPTIONS, "num_pairs": -1})


def test_answers_end_with_eos(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    dataset = PreferenceDataset([folder / "pairs.parquet"], tokenizer, DataConfig())
    assert len(dataset) == 300
    batch = dataset.batch([4, 2])
    rows = rows_of(folder / "pairs.parquet")
    for i, number in enumerate((4, 2)):
        for name, key in (("chosen_ids", "chosen"), ("rejected_ids", "rejected")):
            assert batch[name].row(i).tolist() == [
                *tokenizer.encode(rows[number][key]),
                tokenizer.eos_id,
            ]
        assert (
            tokenizer.decode(batch["prompt_ids"].row(i))
            == rows[number]["prompt"][0]["content"] + "="
        )


def test_equal_answers_are_refused_by_row(folder: Path, tmp_path: Path) -> None:
    refused(
        folder,
        tmp_path,
        r"bad\.parquet, row 0: columns 'chosen' and 'rejected' contain the same answer '13'.*remove "
        r"the row",
        chosen="13",
    )
    cut = DataConfig(max_response_length=1, truncation="right")
    refused(folder, tmp_path, r"the same answer '12' \(after truncation\)", cut)


def test_a_missing_column_and_a_long_answer_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(
        folder,
        tmp_path,
        r"row 0: the response with its end token has 3 tokens",
        DataConfig(max_response_length=2),
    )
    pq.write_table(
        pa.table({"prompt": [[{"role": "user", "content": "1"}]], "chosen": ["1"]}),
        tmp_path / "short.parquet",
    )
    with pytest.raises(
        DataError, match=r"column 'rejected' is missing; the file has prompt, chosen"
    ):
        PreferenceDataset(
            [tmp_path / "short.parquet"], load_tokenizer(folder / "tokenizer"), DataConfig()
        )


def test_long_pairs_are_dropped_when_asked_for(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    with pytest.raises(DataError, match=r"no rows left \(300 dropped"):
        PreferenceDataset(
            [folder / "pairs.parquet"],
            tokenizer,
            DataConfig(max_response_length=2, filter_overlong_prompts=True),
        )


def test_pairs_become_rows_that_alternate() -> None:
    from hybridflow.batch import Jagged
    from hybridflow.workers.model_role import interleave_pairs

    columns = {"prompt_ids": [[1], [2, 2]], "chosen_ids": [[3], [4]], "rejected_ids": [[5, 5], [6]]}
    batch = interleave_pairs(
        DataProto.from_columns(
            {name: Jagged.from_rows(rows, "int64") for name, rows in columns.items()}
        )
    )
    assert [batch["prompt_ids"].row(i).tolist() for i in range(4)] == [[1], [1], [2, 2], [2, 2]]
    assert [batch["response_ids"].row(i).tolist() for i in range(4)] == [[3], [5, 5], [4], [6]]
