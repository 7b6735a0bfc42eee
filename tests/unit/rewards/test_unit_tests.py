"""Unit tests that a policy writes: their rewards are those of CURE's paper, and programs are run on
them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from hybridflow.errors import ResourceError
from hybridflow.rewards.sandbox import Sandbox
from hybridflow.rewards.unit_tests import ProgramRuns, UnitTest, unit_test_of, unit_test_rewards


def matrices(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(execution matrix [n, m], which programs are right [n]) of all kinds, none and all right
    included."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        n, m = rng.integers(1, 9, size=2)
        right = rng.random(n) < rng.random()
        passed = rng.random((n, m)) < rng.random((1, m))
        # most unit tests are right: all right programs pass them
        passed |= right[:, None] & (rng.random(m) < 0.7)
        yield passed, right


def test_the_reward_of_a_unit_test_is_the_papers() -> None:
    """The paper's equation, with loops over the programs."""
    seen = set()
    for passed, right in matrices(400):
        is_test = np.arange(passed.shape[1]) % 5 > 0
        found, _ = unit_test_rewards(passed, right, is_test)
        for test, value in enumerate(found):
            penalty = 0
            product = 1
            wrong = 0
            for program, is_right in enumerate(right):
                penalty += (1 - is_right) * passed[program, test]
                wrong += 1 - is_right
                if is_right:
                    product *= passed[program, test]
            wanted = product * wrong - penalty if is_test[test] else -wrong
            assert value == (wanted if right.any() else 0)
            seen.add(np.sign(value))
    assert seen == {-1, 0, 1}


def test_the_mean_reward_over_the_wrong_programs_is_the_estimate_of_mu() -> None:
    """mu = p_u (1 - p_01) - (1 - p_u) p_00 with every probability counted."""
    compared = 0
    for passed, right in matrices(400):
        _, mu = unit_test_rewards(passed, right, np.ones(passed.shape[1], bool))
        if not right.any() or right.all():
            assert mu is None
            continue
        by_right_test: dict[bool, list[bool]] = {True: [], False: []}
        for test in range(passed.shape[1]):
            accepted = all(passed[program, test] for program in np.flatnonzero(right))
            by_right_test[accepted] += [
                bool(passed[program, test]) for program in np.flatnonzero(~right)
            ]
        p_u = len(by_right_test[True]) / passed[~right].size
        p_01, p_00 = (
            sum(found) / max(len(found), 1) for found in (by_right_test[True], by_right_test[False])
        )
        assert mu == pytest.approx(p_u * (1 - p_01) - (1 - p_u) * p_00)
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("tests", [1, 4, 16])
def test_the_reward_precision_is_at_least_what_the_module_says(tests: int) -> None:
    """A right program passes the right unit tests alone; all outcomes of the unit tests are
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
        # of how many more unit tests the right program passes, from -tests to tests
        distribution = np.ones(1)
        for _ in range(tests):
            distribution = np.convolve(distribution, [loss, 1 - gain - loss, gain])
        assert distribution[tests + 1 :].sum() >= 1 - math.exp(-tests * mu * mu / 2) - 1e-12
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```\n4\n```\n```\n12\n```", UnitTest("4\n", "12")),
        ("Input:\n```text\n4\n5\n```\nOutput:\n```\n9\n```\nDone.", UnitTest("4\n5\n", "9")),
        ("```python\nx = 1\n```\n```\n4\n```\n```\n12\n```", UnitTest("4\n", "12")),
        ("<think>```\n1\n```\n```\n2\n```</think>```\n4\n```\n```\n12\n```", UnitTest("4\n", "12")),
        ("```\n\n```\n```\n12\n```", UnitTest("\n", "12")),
        ("```\n4\n```\n```\n12", None),
        ("```\n4\n```\n```\n\n```", None),
        ("```\n4\n```", None),
        ("4 12", None),
        ("", None),
    ],
)
def test_a_unit_test_is_two_closed_blocks(response: str, expected: UnitTest | None) -> None:
    assert unit_test_of(response) == expected


def program(text: str) -> str:
    return f"```python\n{text}\n```"


def test_each_program_is_run_on_each_unit_test() -> None:
    try:
        Sandbox().close()
    except ResourceError as error:
        pytest.skip(str(error))
    programs = [
        program("print(int(input())*3)"),
        program("x=int(input())\nprint(x+x+x)"),
        program("print(int(input())+3)"),
        program("print(12)\nraise SystemExit(1)"),
        program("while True: pass"),
        "print(12)",
        program("print(int(input())*3)"),
    ]
    tests = [UnitTest("4\n", "12"), None, UnitTest("3\n", "6"), UnitTest("4\n", "12")]

    async def tables() -> list[np.ndarray]:
        with ProgramRuns(test_timeout_s=1.0) as runs:
            return list(await asyncio.gather(*[runs.passed(programs, tests) for _ in range(2)]))

    first, again = asyncio.run(tables())
    tripled = [True, False, False, True]
    nothing = [False] * 4
    added = [False, False, True, False]
    assert first.tolist() == [tripled, tripled, added, nothing, nothing, nothing, tripled]
    assert again.tolist() == first.tolist()
