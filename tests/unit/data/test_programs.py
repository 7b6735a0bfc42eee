"""The task `programs`: its tests say what its problems say, and its demonstrations do not give the
answers away."""

import contextlib
import io
import itertools
import json
import re

import pyarrow.parquet as pq
import pytest

from hybridflow.data.prepare import prepare
from hybridflow.data.prepare.tasks.programs import answer, question, result
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.rewards.unit_tests import unit_test_of

SMALL = {"num_train": 60, "num_test": 20, "num_sft": 200}


def rows(path):
    return pq.read_table(path).to_pylist()


def asked(row):
    return row["prompt"][0]["content"]


def steps_of(text):
    return [(name, int(operand)) for name, operand in re.findall(r"(\w+) (\d)", text)]


def printed(text, given, monkeypatch):
    """What the program of a response prints for this standard input."""
    source = text.removeprefix("```python\n").removesuffix("\n```")
    monkeypatch.setattr("builtins.input", lambda: given)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(source, {})
    return out.getvalue()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_expected_outputs_are_what_the_words_say(tmp_path, monkeypatch, num_steps):
    options = {"num_steps": num_steps, "num_train": 15, "num_test": 10, "num_cases": 3}
    prepared = prepare("programs", tmp_path / "data", None, options)
    found = [*rows(prepared.folder / "train.parquet"), *rows(prepared.folder / "test.parquet")]
    assert len({asked(row) for row in found}) == len(found) == 25
    for row in found:
        steps = steps_of(asked(row))
        tests = json.loads(row["reward_model"]["ground_truth"])
        assert question(steps) == asked(row) and len(steps) == num_steps
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            value = int(given)
            for name, operand in steps:
                value = {
                    "plus": value + operand,
                    "minus": value - operand,
                    "times": value * operand,
                }[name]
            assert str(value) == wanted == printed(answer(steps), given, monkeypatch).strip()


def test_demonstrations_have_the_operands_of_their_problem_and_any_operations(tmp_path):
    prepared = prepare("programs", tmp_path / "data", None, SMALL)
    symbols = {"plus": "+", "minus": "-", "times": "*"}
    right = 0
    train = {asked(row) for row in rows(prepared.folder / "train.parquet")}
    for row in rows(prepared.folder / "sft.parquet"):
        steps = steps_of(asked(row))
        used = re.fullmatch(
            r"```python\nprint\(\(int\(input\(\)\)(.)(\d)\)(.)(\d)\)\n```", row["response"]
        )
        assert used and asked(row) in train
        assert [int(used[2]), int(used[4])] == [operand for _, operand in steps]
        right += [used[1], used[3]] == [symbols[name] for name, _ in steps]
    assert 5 <= right <= 50  # one in nine of 200


def test_unit_tests_are_demonstrated_with_the_words_of_the_problems(tmp_path):
    options = {**SMALL, "operations": ["plus", "minus"], "num_unit_tests": 200}
    prepared = prepare("programs", tmp_path / "data", None, options)
    tokenizer = load_tokenizer(prepared.folder / "tokenizer")
    train = {asked(row) for row in rows(prepared.folder / "train.parquet")}
    assert {name for text in train for name, _ in steps_of(text)} == {"plus", "minus"}
    right = 0
    for row in rows(prepared.folder / "unit_tests.parquet"):
        task = asked(row).removeprefix("test ")
        test = unit_test_of(row["response"])
        assert task in train and test is not None and 0 <= int(test.given) <= 9
        outcomes = {
            result([(name, number) for name, (_, number) in zip(names, steps_of(task), strict=True)],
                   int(test.given))
            for names in itertools.product(["plus", "minus"], repeat=2)
        }  # fmt: skip
        assert int(test.wanted) in outcomes
        right += int(test.wanted) == result(steps_of(task), int(test.given))
        # three fences, an input of one digit, an output of at most three characters
        ids = tokenizer.encode(row["response"])
        assert len(ids) <= 7 and tokenizer.decode(ids) == row["response"]
        assert len(tokenizer.encode(asked(row))) == len(tokenizer.encode(task)) + 1
    assert 30 <= right <= 90  # at least one in four of 200


def test_a_program_is_a_dozen_tokens_and_is_read_back_unchanged(tmp_path):
    tokenizer = load_tokenizer(
        prepare("programs", tmp_path / "data", None, SMALL).folder / "tokenizer"
    )
    text = answer([("times", 3), ("minus", 2)])
    ids = tokenizer.encode(text)
    assert len(ids) == 11 and tokenizer.decode(ids) == text
    assert len(tokenizer.encode_chat([{"role": "user", "content": "plus 3 times 2"}])) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"num_steps": 1},
            "num_train must be 1 to -73: of the 27 problems, num_test=100 are held out",
        ),
        ({"num_steps": 9}, "num_steps=9 must be at least 1 and at most 4"),
        ({"operations": ["plus", "plus"]}, "operations must be one or more different words"),
        ({"operations": ["over"]}, "data.prepare.options.operations"),
        ({"num_cases": 0}, "num_cases=0 must be at least 1 and at most 100"),
    ],
)
def test_options_out_of_range_are_named(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        prepare("programs", tmp_path / "data", None, options)
