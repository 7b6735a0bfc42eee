import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.prepare import prepare
from hybridflow.data.prepare.tasks import arithmetic
from hybridflow.data.prepare.tasks.arithmetic import ArithmeticOptions, problem
from hybridflow.errors import ConfigError, DataError

SMALL = {"max_operand": 12, "num_test": 20, "num_sft": 30}


def _rows(path: Path | None) -> list[dict]:
    assert path is not None
    return pq.read_table(path).to_pylist()


def _questions(path: Path | None) -> list[str]:
    return [row["prompt"][0]["content"] for row in _rows(path)]


def _write_gsm8k(folder: Path, test_tail: str = "") -> Path:
    folder.mkdir()
    rows = [
        {"question": f"What is {i} thousand?", "answer": f"It is <<{i}*1000>>.\n#### {i},000"}
        for i in range(1, 5)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    (folder / "test.jsonl").write_text(text + test_tail)
    return folder


# --- arithmetic


def test_rows_have_the_field_names_users_know(tmp_path):
    prepared = prepare(
        "arithmetic", tmp_path / "data", None, {**SMALL, "reverse_answer": True, "zero_pad": True}
    )
    row = _rows(prepared.folder / "train.parquet")[7]
    a = row["extra_info"]["a"]
    b = row["extra_info"]["b"]
    assert row == {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{a + b:02d}"[::-1]},
        "extra_info": {"split": "train", "index": 7, "operation": "add", "a": a, "b": b},
    }
    demonstration = _rows(prepared.folder / "sft.parquet")[0]
    first, second = map(int, demonstration["prompt"][0]["content"].split("+"))
    assert demonstration["response"] == f"{first + second:02d}"[::-1]


def test_held_out_pairs_are_in_no_other_file_and_all_others_are_in_train(tmp_path):
    prepared = prepare("arithmetic", tmp_path / "data", None, SMALL)
    train, test, sft = (
        _questions(f)
        for f in (
            prepared.folder / "train.parquet",
            prepared.folder / "test.parquet",
            prepared.folder / "sft.parquet",
        )
    )
    assert (len(train), len(test), len(sft)) == (13 * 13 - 20, 20, 30)
    assert len({*train, *test}) == 13 * 13
    assert not {*test} & {*sft}
    assert len({*sft}) == 30


def test_the_held_out_set_is_the_same_for_all_seeds_and_the_training_draw_is_not(tmp_path):
    one = prepare("arithmetic", tmp_path / "one", None, {**SMALL, "num_train": 50, "seed": 1})
    two = prepare("arithmetic", tmp_path / "two", None, {**SMALL, "num_train": 50, "seed": 2})
    other = prepare("arithmetic", tmp_path / "other", None, {**SMALL, "holdout_seed": 7})
    assert (
        _questions(one.folder / "test.parquet")
        == _questions(two.folder / "test.parquet")
        != _questions(other.folder / "test.parquet")
    )
    assert _questions(one.folder / "train.parquet") != _questions(two.folder / "train.parquet")
    assert _questions(one.folder / "sft.parquet") != _questions(two.folder / "sft.parquet")


def test_swapped_pairs_can_be_held_out_too(tmp_path):
    prepared = prepare("arithmetic", tmp_path / "data", None, {**SMALL, "hold_out_swapped": True})
    held_out = {
        frozenset(question.split("+")) for question in _questions(prepared.folder / "test.parquet")
    }
    assert all(
        frozenset(question.split("+")) not in held_out
        for question in _questions(prepared.folder / "train.parquet")
    )


def test_a_range_too_large_to_list_is_sampled(tmp_path):
    prepared = prepare(
        "arithmetic",
        tmp_path / "data",
        None,
        {"min_operand": 10**7, "max_operand": 10**8, "num_train": 100, "num_test": 10},
    )
    assert len({*_questions(prepared.folder / "train.parquet")}) == 100


@given(
    st.sampled_from(["add", "sub", "mul"]),
    st.tuples(st.integers(0, 999), st.integers(0, 999)),
    st.integers(0, 50),
    st.integers(999, 2000),
    st.tuples(st.booleans(), st.booleans()),
)
def test_written_answers_are_right_and_fit_the_stated_lengths(operation, pair, low, high, flags):
    reverse, pad = flags
    a, b = (max(low, operand) for operand in pair)
    options = ArithmeticOptions(
        operation=operation, min_operand=low, max_operand=high, reverse_answer=reverse, zero_pad=pad
    )
    question, answer = problem(a, b, options)
    left, right = question.replace("*", "+").replace("-", "+").split("+")
    digits = answer.removeprefix("-")
    value = int(digits[::-1] if reverse else digits) * (-1 if answer.startswith("-") else 1)
    assert (int(left), int(right)) == (a, b)
    assert value == {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    largest = {"add": 2 * high, "sub": high - low, "mul": high * high}[operation]
    assert len(question) + 1 <= 2 * len(str(high)) + 2  # with "="
    assert len(answer) + 1 <= len(str(largest)) + (operation == "sub") + 1  # with eos
    if pad:
        assert (len(left), len(right), len(digits)) == (
            len(str(high)),
            len(str(high)),
            len(str(largest)),
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_tests": 5}, "num_tests.*did you mean data.prepare.options.num_test"),
        ({"num_train": "5"}, "num_train.*expected whole number"),
        ({"num_train": True}, "num_train.*expected whole number"),
        ({"operation": "sum"}, "operation: got 'sum', choose one of: add, sub, mul"),
        ({"min_operand": -1}, "min_operand=-1 must be at least 0"),
        ({"min_operand": 9, "max_operand": 3}, "max_operand must be at least min_operand"),
        ({"max_operand": 9}, "num_test is 500, but .* only 100 pairs"),
        ({"max_operand": 30, "num_train": 500}, "num_train is 500, but only 461 of "),
        ({"max_operand": 30, "num_sft": 500}, "num_sft is 500, but only 461 of "),
        ({"num_train": 0}, "num_train must be positive"),
        ({"num_train": -2}, "num_train must be positive, or -1 for all, got -2"),
        ({"max_operand": 99_999}, "num_train must be at most 5000000 rows"),
    ],
)
def test_wrong_options_are_named_and_leave_nothing_behind(tmp_path, options, named):
    with pytest.raises(ConfigError, match=named):
        prepare("arithmetic", tmp_path / "data", None, options)
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_minus_one_takes_all_prompts_that_are_not_held_out(tmp_path):
    made = prepare("arithmetic", tmp_path / "data", None, {**SMALL, "num_train": -1})
    assert made.rows["train.parquet"] == 13**2 - SMALL["num_test"]


def test_an_unknown_task_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"task=arithmetics: .* did you mean 'arithmetic'\?"):
        prepare("arithmetics", tmp_path / "data")


def test_a_task_without_raw_files_refuses_a_source(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.prepare\.source"):
        prepare("arithmetic", tmp_path / "data", tmp_path)


# --- idempotence and atomicity


def test_the_same_request_again_writes_nothing(tmp_path):
    first = prepare("arithmetic", tmp_path / "data", None, SMALL)
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    again = prepare("arithmetic", tmp_path / "data", None, {**SMALL, "seed": 1})
    assert (first.reused, again.reused) == (False, True)
    assert again.rows == first.rows == {"train.parquet": 149, "test.parquet": 20, "sft.parquet": 30}
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == stamps


def test_another_request_replaces_the_folder_whole(tmp_path):
    prepare("arithmetic", tmp_path / "data", None, SMALL)
    second = prepare("arithmetic", tmp_path / "data", None, {**SMALL, "num_sft": 0})
    assert (second.reused, "sft.parquet" in second.rows) == (False, False)
    assert not (tmp_path / "data" / "sft.parquet").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    "damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-9])]
)
def test_a_damaged_file_is_prepared_again(tmp_path, damage):
    first = prepare("arithmetic", tmp_path / "data", None, SMALL)
    damage(first.folder / "train.parquet")
    again = prepare("arithmetic", tmp_path / "data", None, SMALL)
    assert not again.reused
    assert len(_rows(again.folder / "train.parquet")) == 149


@pytest.mark.parametrize("prepared_before", [False, True])
def test_files_of_the_user_are_never_deleted(tmp_path, prepared_before):
    folder = tmp_path / "data"
    if prepared_before:
        prepare("arithmetic", folder, None, SMALL)
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt.*choose another"):
        prepare("arithmetic", folder, None, {**SMALL, "seed": 9})
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_failure_half_way_leaves_the_old_preparation_whole(tmp_path, monkeypatch):
    first = prepare("arithmetic", tmp_path / "data", None, SMALL)

    def fail(folder: Path, characters: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(arithmetic, "write_character_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare("arithmetic", tmp_path / "data", None, {**SMALL, "seed": 9})
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert prepare("arithmetic", tmp_path / "data", None, SMALL).reused
    assert len(_rows(first.folder / "train.parquet")) == 149


def test_losing_the_race_to_another_process_is_no_error(tmp_path, monkeypatch):
    real = os.replace

    def other_is_faster(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", real)
        prepare("arithmetic", tmp_path / "data", None, SMALL)
        real(source, target)

    monkeypatch.setattr(os, "replace", other_is_faster)
    assert prepare("arithmetic", tmp_path / "data", None, SMALL).rows["train.parquet"] == 149
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# --- gsm8k


def test_games_of_guessing_are_consistent(tmp_path):
    done = prepare(
        "guess",
        tmp_path / "d",
        None,
        {"largest": 19, "num_train": 300, "num_test": 50, "num_sft": 400},
    )
    assert done.rows == {"train.parquet": 300, "test.parquet": 50, "sft.parquet": 400}
    rows = pq.read_table(done.folder / "train.parquet").to_pylist()
    assert {row["data_source"] for row in rows} == {"guess"}
    assert {row["prompt"][0]["content"] for row in rows} == {"0-19"}
    assert {int(row["reward_model"]["ground_truth"]) for row in rows} == set(range(20))
    rounds = set()
    for game in pq.read_table(done.folder / "sft.parquet").to_pylist():
        moves = [message["content"] for message in game["prompt"][1:]]
        larger = [
            int(guess) for guess, said in zip(moves[::2], moves[1::2], strict=True) if said == "+"
        ]
        smaller = [
            int(guess) for guess, said in zip(moves[::2], moves[1::2], strict=True) if said == "-"
        ]
        assert len(larger) + len(smaller) == len(moves) // 2, "a game ends with the right guess"
        assert max(larger, default=-1) + 1 < min(smaller, default=20), (
            "some number fits all that was said"
        )
        assert 0 <= int(game["response"]) <= 19
        rounds.add(len(moves) // 2)
    assert rounds == {0, 1, 2, 3}


def test_gsm8k_rows(tmp_path):
    prepared = prepare("gsm8k", tmp_path / "data", _write_gsm8k(tmp_path / "raw"))
    assert prepared.rows == {"train.parquet": 4, "test.parquet": 4}
    row = _rows(prepared.folder / "test.parquet")[2]
    content = row["prompt"][0].pop("content")
    assert content.startswith("What is 3 thousand? ") and "####" in content
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3000"},
        "extra_info": {"split": "test", "index": 2},
    }


def test_gsm8k_takes_max_rows_and_notices_a_changed_source(tmp_path):
    source = _write_gsm8k(tmp_path / "raw")
    assert prepare("gsm8k", tmp_path / "data", source, {"max_rows": 3}).rows == {
        "train.parquet": 3,
        "test.parquet": 3,
    }
    assert prepare("gsm8k", tmp_path / "data", source, {"max_rows": 3}).reused
    with (source / "train.jsonl").open("a") as stream:
        stream.write(json.dumps({"question": "q", "answer": "#### 1"}) + "\n")
    assert not prepare("gsm8k", tmp_path / "data", source, {"max_rows": 3}).reused


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"question": "cut o', "line 6: not valid JSON"),
        ('["a list"]', "line 6: expected an object"),
        ('{"question": "q"}', "row 4: column 'answer' is missing; it has question"),
        ('{"question": "q", "answer": 5}', "row 4, column 'answer': expected a string"),
        (
            '{"question": "q", "answer": "no mark 5"}',
            "row 4, column 'answer': .* final answer after \"####\"",
        ),
        (
            '{"question": "q", "answer": "x #### "}',
            "row 4, column 'answer': .* final answer after \"####\"",
        ),
    ],
)
def test_a_malformed_line_is_named_with_file_and_number(tmp_path, line, named):
    source = _write_gsm8k(tmp_path / "raw", test_tail="\n" + line + "\n")
    with pytest.raises(DataError, match=rf"test\.jsonl, {named}"):
        prepare("gsm8k", tmp_path / "data", source)
    assert not (tmp_path / "data").exists()


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.prepare\.source"):
        prepare("gsm8k", tmp_path / "data")
    with pytest.raises(DataError, match="no files for split train and test"):
        prepare("gsm8k", tmp_path / "data", tmp_path)
