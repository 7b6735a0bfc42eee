"""examples/cure: its rewards are those of the paper, and the two roles' answers to a problem
meet."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hybridflow.config.registry import import_file
from hybridflow.data.prepare import prepare
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.rewards.sandbox import Sandbox

CURE = Path(__file__).resolve().parents[2] / "examples" / "cure"
TRUTH = {"tests": [[0, "0"], [3, "9"], [6, "18"]], "solution": "x*3"}


@pytest.fixture(scope="module")
def reward():
    return import_file(CURE / "reward.py", "reward.path")


@pytest.fixture(scope="module")
def sandbox():
    try:
        Sandbox().close()
    except ResourceError as error:
        pytest.skip(str(error))


def matrices(count: int):
    """(execution matrix [n, m], which codes are right [n]) of all kinds, none and all right
    included."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        n, m = rng.integers(1, 9, size=2)
        right = rng.random(n) < rng.random()
        passed = rng.random((n, m)) < rng.random((1, m))
        # most unit tests are right: all right codes pass them
        passed |= right[:, None] & (rng.random(m) < 0.7)
        yield passed, right


# --- the derivation


def test_the_reward_of_a_unit_test_is_the_papers(reward):
    """The paper's equation, with loops over the codes."""
    seen = set()
    for passed, right in matrices(400):
        found, _ = reward.unit_test_rewards(passed, right)
        for test, value in enumerate(found):
            penalty = 0
            product = 1
            wrong = 0
            for code, is_right in enumerate(right):
                penalty += (1 - is_right) * passed[code, test]
                wrong += 1 - is_right
                if is_right:
                    product *= passed[code, test]
            assert value == (product * wrong - penalty if right.any() else 0)
            seen.add(np.sign(value))
    assert seen == {-1, 0, 1}


def test_the_mean_reward_over_the_wrong_codes_is_the_estimate_of_mu(reward):
    """mu = p_u (1 - p_01) - (1 - p_u) p_00 with every probability counted."""
    compared = 0
    for passed, right in matrices(400):
        _, mu = reward.unit_test_rewards(passed, right)
        if not right.any() or right.all():
            assert mu is None
            continue
        by_right_test = {True: [], False: []}
        for test in range(passed.shape[1]):
            accepted = all(passed[code, test] for code in np.flatnonzero(right))
            by_right_test[accepted] += [bool(passed[code, test]) for code in np.flatnonzero(~right)]
        p_u = len(by_right_test[True]) / passed[~right].size
        p_01, p_00 = (
            sum(found) / max(len(found), 1) for found in (by_right_test[True], by_right_test[False])
        )
        assert mu == pytest.approx(p_u * (1 - p_01) - (1 - p_u) * p_00)
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("tests", [1, 4, 16])
def test_the_reward_precision_is_at_least_what_the_example_says(tests):
    """A right code passes the right unit tests alone; all outcomes of the unit tests are
    enumerated."""
    compared = 0
    for p_u, p_01, p_00 in itertools.product(
        (0.2, 0.5, 0.8, 1.0), (0.0, 0.3, 0.9), (0.0, 0.3, 0.9)
    ):
        gain = p_u * (1 - p_01)
        loss = (1 - p_u) * p_00
        mu = gain - loss
        if mu <= 0:
            continue
        # of how many more unit tests the right code passes, from -tests to tests
        distribution = np.ones(1)
        for _ in range(tests):
            distribution = np.convolve(distribution, [loss, 1 - gain - loss, gain])
        assert distribution[tests + 1 :].sum() >= 1 - math.exp(-tests * mu * mu / 2) - 1e-12
        compared += 1
    assert compared > 10


# --- programs and unit tests that are run


def test_codes_and_unit_tests_judge_each_other(reward, sandbox):
    codes = ["x*3", "x+x+x", "x+3", "9 if x == 3 else 0", "x*", "(lambda: 1/x)()", "9**9**9"]
    tests = ["4:12", "3:9", "4:7", "0:3", "12", "4:012"]
    found = reward.judged(codes, tests, TRUTH)
    # x+3 passes none of 0:0, 3:9 and 6:18; the fourth passes two of them
    assert [round(one["score"], 3) for one in found["code"]] == [1, 1, 0, 0.667, 0, 0, 0]
    assert [one["right"] for one in found["code"]] == [True, True, *[False] * 5]
    # of five wrong codes none passes 4:12, one 3:9, one 4:7, one 0:3, none 4:012; 12 is no unit
    # test
    assert [one["score"] for one in found["test"]] == [5, 4, -1, -1, -5, 0]
    assert [one["right"] for one in found["test"]] == [True, True, False, False, False, False]
    assert all(one["mu"] == pytest.approx(7 / 6 / 5) for one in found["test"])


def asked(reward, role, answers, *, split="train", pair=7):
    info = {"split": split, "role": role, "pair": pair}
    count = len(answers)
    return reward.compute_score(
        [f"cure/{role}"] * count, answers, [json.dumps(TRUTH)] * count, [info] * count
    )


@pytest.mark.parametrize("order", [("code", "test"), ("test", "code")])
def test_the_answers_of_both_roles_to_a_problem_are_judged_together(reward, sandbox, order):
    answers = {"code": ["x*3", "x+3"], "test": ["4:12", "4:7", "0:0"]}

    async def both():
        calls = [asked(reward, role, answers[role], pair=pair) for pair in (1, 2) for role in order]
        return await asyncio.gather(*calls)

    first, second, *again = asyncio.run(both())
    found = dict(zip(order, (first, second), strict=True))
    assert again == [first, second]
    assert [one["score"] for one in found["code"]] == [1, 0]
    assert [one["score"] for one in found["test"]] == [1, -1, 1]


def test_held_out_answers_are_right_or_wrong_by_themselves(reward, sandbox):
    answers = [("code", "x+x*2"), ("code", "x+3"), ("test", "5:15"), ("test", "5:8"), ("test", "?")]
    found = [
        asyncio.run(asked(reward, role, [text], split="test"))[0]["score"] for role, text in answers
    ]
    assert found == [1, 0, 1, 0, 0]


def test_answers_whose_other_role_does_not_come_fail_with_what_to_do(reward, monkeypatch):
    monkeypatch.setattr(reward, "PATIENCE_S", 0.01)
    with pytest.raises(
        RuntimeError, match=r"problem 7 as a test are not in the batch.*data\.shuffle=false"
    ):
        asyncio.run(asked(reward, "code", ["x"]))
    assert not reward._waiting


# --- the data


def test_the_rows_of_a_problem_are_side_by_side_and_held_out_ones_are_nowhere_else(tmp_path):
    prepared = prepare(
        f"{CURE / 'problems.py'}:cure", tmp_path / "data", None, {"num_pairs": 50, "num_sft": 80}
    )
    train, test, sft = (
        pq.read_table(path).to_pylist()
        for path in (
            prepared.folder / "train.parquet",
            prepared.folder / "test.parquet",
            prepared.folder / "sft.parquet",
        )
    )
    assert (len(train), len(test), len(sft)) == (100, 24, 160)
    for rows in (train, test):
        for number, (code, unit_test) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
            assert [row["extra_info"]["role"] for row in (code, unit_test)] == ["code", "test"]
            assert code["extra_info"]["pair"] == unit_test["extra_info"]["pair"] == number
            assert code["reward_model"] == unit_test["reward_model"]
            word, operand = code["prompt"][0]["content"].removeprefix("code ").split()
            assert unit_test["prompt"][0]["content"] == f"test {word} {operand}"
            for x, wanted in json.loads(code["reward_model"]["ground_truth"])["tests"]:
                k = int(operand)
                assert int(wanted) == {
                    "plus": x + k, "minus": x - k, "most": max(x, k), "least": min(x, k)
                }[word]  # fmt: skip
    held_out = {row["prompt"][0]["content"] for row in test}
    assert len(held_out) == 24 and not held_out & {
        row["prompt"][0]["content"] for row in [*train, *sft]
    }
    assert {
        row["response"].count(":") for row in sft if row["prompt"][0]["content"].startswith("test")
    } == {1}


def test_options_out_of_range_are_named(tmp_path):
    with pytest.raises(ConfigError, match="num_sft must be at least 1"):
        prepare(f"{CURE / 'problems.py'}:cure", tmp_path / "data", None, {"num_sft": 0})
