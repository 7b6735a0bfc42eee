"""CURE's rewards: the codes and the unit tests that one policy writes for a problem judge each
other by execution.

Wang et al., "Co-Evolving LLM Coder and Unit Tester via Reinforcement Learning", arXiv 2506.03136.
For n codes, m unit tests of the policy and t ground-truth tests, B[l, k] says whether code l passes
test k (the m first), and I[l] whether it passes all ground-truth tests. The reward of code l is its
share of ground-truth tests; that of unit test k is

    R[k] = -sum_l (1 - I[l]) B[l, k] + (prod_{l: I[l]=1} B[l, k]) sum_l (1 - I[l]).

A unit test that all right codes pass counts as right, and gains by each wrong code that fails it;
any other loses by each wrong code that passes it. The mean of R over the tests, divided by the
number of wrong codes, estimates

    mu = p_u (1 - p_01) - (1 - p_u) p_00

with p_u the probability that a unit test is right, and p_01 and p_00 those that a wrong code passes
a right and a wrong one. Ranking codes by how many unit tests they pass puts a right code before a
wrong one with a probability (the reward precision) that goes to 1 with the number of tests if mu is
positive, and is at least 1 - exp(-m mu^2 / 2).
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.rewards.sandbox import Limits, Sandbox

OTHER = {"code": "test", "test": "code"}
PATIENCE_S = 60.0
# the expression comes over standard input, and what tests expect stays outside
PROGRAM = """
import json
given = json.loads(input())
found = []
for x in given["inputs"]:
    try:
        found.append(str(eval(given["code"], {"x": x})))
    except Exception:
        found.append(None)
print("\\n" + json.dumps(found))
"""
Test = tuple[int, str]  # x, and what is expected
_waiting: dict[tuple[int, str], tuple[list[str], asyncio.Future[list[dict[str, Any]]]]] = {}


async def compute_score(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Rewards of the codes, or of the unit tests, for a problem. In training they wait for the
    other role's, which are the samples of the next row; a held-out answer counts 1 where it is
    right, else 0.

    Raises:
        RuntimeError: the other role's answers are not in this batch.
    """
    info = extra_infos[0]
    truth = json.loads(ground_truths[0])
    pair = int(info["pair"])
    role = str(info["role"])
    answers = list(solution_strs)
    if info["split"] == "test":
        alone = {role: answers, OTHER[role]: []}
        return [
            {**one, "score": float(one["right"])}
            for one in judged(alone["code"], alone["test"], truth)[role]
        ]
    if (pair, OTHER[role]) not in _waiting:
        return await _rewards_by_other(pair, role, answers)
    theirs, future = _waiting.pop((pair, OTHER[role]))
    both = {role: answers, OTHER[role]: theirs}
    try:
        found = judged(both["code"], both["test"], truth)
    except Exception as error:
        future.set_exception(RuntimeError(str(error)))
        raise
    future.set_result(found[OTHER[role]])
    return found[role]


async def _rewards_by_other(pair: int, role: str, answers: list[str]) -> list[dict[str, Any]]:
    """The rewards of these answers, once the other role's have come."""
    future: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
    _waiting[pair, role] = answers, future
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await future
    except TimeoutError:
        raise RuntimeError(
            f"the answers to problem {pair} as a {OTHER[role]} are not in the batch of those as a "
            f"{role}: set data.shuffle=false, an even data.train_batch_size, and reward.processes "
            "to 0 or 1"
        ) from None
    finally:
        if _waiting.get((pair, role), ([], None))[1] is future:
            del _waiting[pair, role]


def judged(
    codes: Sequence[str], tests: Sequence[str], truth: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """{role: a reward and more for each answer}.

    Args:
        codes: expressions of x.
        tests: unit tests, "x:expected".
        truth: the ground-truth tests [[x, expected], ...], and a solution, which says for metrics
            and validation which unit tests are right.
    """
    read = [parsed(test) for test in tests]
    given = [tuple(test) for test in truth["tests"]]
    passed = execution_matrix([*codes, truth["solution"]], [*read, *given])
    codes_passed = passed[:-1]
    is_right = passed[-1, : len(read)]
    share = codes_passed[:, len(read) :].mean(1) if len(codes) else np.zeros(0)
    rewards, mu = unit_test_rewards(codes_passed[:, : len(read)], share == 1)
    # what is no unit test is worth as little as one that every wrong code passes
    if mu is not None:
        rewards[[test is None for test in read]] = -float((share < 1).sum())
    extra = {} if mu is None else {"mu": mu}
    return {
        "code": [{"score": float(value), "right": bool(value == 1)} for value in share],
        "test": [
            {"score": float(reward), "right": bool(right), **extra}
            for reward, right in zip(rewards, is_right, strict=True)
        ],
    }


def unit_test_rewards(passed: np.ndarray, is_right: np.ndarray) -> tuple[np.ndarray, float | None]:
    """R of each unit test, and the estimate of mu; zeros and None where no code, or every code, is
    right.

    Without a right code nothing says which unit tests are right, and the product over no code would
    call all of them so.

    Args:
        passed: [n, m] bool, whether a code passes a unit test.
        is_right: [n] bool, whether a code passes all ground-truth tests.
    """
    wrong = int((~is_right).sum())
    if wrong in (0, len(is_right)) or not passed.shape[1]:
        return np.zeros(passed.shape[1]), None
    accepted = passed[is_right].all(0)
    rewards = wrong * accepted - passed[~is_right].sum(0)
    return rewards.astype(float), float(rewards.mean() / wrong)


def parsed(test: str) -> Test | None:
    """A unit test; None where the text is none, which no code passes."""
    found = re.fullmatch(r"(\d{1,3}):(-?\d{1,6})", test.strip())
    return (int(found[1]), found[2]) if found else None


def execution_matrix(codes: Sequence[str], tests: Sequence[Test | None]) -> np.ndarray:
    """[codes, tests] bool: whether a code gives what a test expects. Equal codes are run once."""
    inputs = [test[0] for test in tests if test is not None]
    results = {code: iter(results_of(code, inputs)) for code in dict.fromkeys(codes)}
    rows = {
        code: [test is not None and next(found) == test[1] for test in tests]
        for code, found in results.items()
    }
    return np.array([rows[code] for code in codes], dtype=bool).reshape(len(codes), len(tests))


def results_of(code: str, inputs: Sequence[int]) -> list[str | None]:
    """What an expression gives for each x, run in the sandbox; None where it fails."""
    found = _sandbox().run(
        PROGRAM, json.dumps({"code": code, "inputs": list(inputs)}), Limits(timeout_s=2.0)
    )
    try:
        results = json.loads(found.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        results = None
    if not isinstance(results, list) or len(results) != len(inputs):
        return [None] * len(inputs)
    return results


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()
