"""Unit tests written by a policy, and their rewards by running programs on them (CURE, Wang et al.,
arXiv 2506.03136).

For the programs l and the unit tests k that were written for a task, B[l, k] says whether program l
passes unit test k, and I[l] whether it passes all ground-truth tests. The reward of unit test k is

    R[k] = -sum_l (1 - I[l]) B[l, k] + (prod_{l: I[l]=1} B[l, k]) sum_l (1 - I[l]).

A unit test that all right programs pass counts as right, and gains by each wrong program that fails
it; any other loses by each wrong program that passes it. The mean of R over the unit tests, divided
by the number of wrong programs, estimates

    mu = p_u (1 - p_01) - (1 - p_u) p_00

with p_u the probability that a unit test is right, and p_01 and p_00 those that a wrong program
passes a right and a wrong one. Ranking programs by how many unit tests they pass puts a right
program before a wrong one with a probability (the reward precision) that goes to 1 with the number
of tests if mu is positive, and is at least 1 - exp(-m mu^2 / 2).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np

from hybridflow.rewards.program_tests import same_output
from hybridflow.rewards.reading import fenced_blocks, read_response
from hybridflow.rewards.sandbox import Limits, Sandbox
from hybridflow.rewards.verifiers.code import program_of

_MAX_SANDBOXES = 16


@dataclass(frozen=True)
class UnitTest:
    """What a program reads from standard input, and what it is expected to print."""

    given: str
    wanted: str


def unit_test_of(response: str) -> UnitTest | None:
    """Return the unit test of a response: its last two fenced blocks, an input and the expected
    output. None if one of them is missing or was cut off, or if no output is expected."""
    blocks = fenced_blocks(read_response(response).answer)[-2:]
    if len(blocks) < 2 or not all(block.closed for block in blocks):
        return None
    given, wanted = blocks
    return UnitTest(f"{given.text}\n", wanted.text) if wanted.text.strip() else None


def unit_test_rewards(
    passed: np.ndarray, is_right: np.ndarray, is_test: np.ndarray
) -> tuple[np.ndarray, float | None]:
    """Return R of each unit test [m], and the estimate of mu.

    Zeros and None where no program, or every program, is right. Without a right program nothing
    says which unit tests are right, and the product over none would call all of them so. A response
    that is no unit test gets the lowest reward there is: that of the formula, 0, is more than a
    wrong unit test gets.

    Args:
        passed: [n, m] bool, whether a program passes a unit test.
        is_right: [n] bool, whether a program passes all ground-truth tests.
        is_test: [m] bool, whether a response is a unit test.
    """
    wrong = int((~is_right).sum())
    if wrong in (0, len(is_right)) or not passed.shape[1]:
        return np.zeros(passed.shape[1]), None
    accepted = passed[is_right].all(0)
    rewards = (wrong * accepted - passed[~is_right].sum(0)).astype(float)
    mu = float(rewards.mean() / wrong)
    rewards[~is_test] = -wrong
    return rewards, mu


class ProgramRuns:
    """Runs programs on unit tests, in a sandbox for each core. Use it as a context manager.

    Args:
        test_timeout_s: wall clock limit of a program on a unit test. After the first timeout a
            program fails its remaining unit tests.

    Raises:
        ResourceError: from `passed`; this machine does not support the sandbox.
    """

    def __init__(self, test_timeout_s: float) -> None:
        self._limits = Limits(timeout_s=test_timeout_s)
        threads = min(len(os.sched_getaffinity(0)), _MAX_SANDBOXES)
        self._threads = ThreadPoolExecutor(threads, "sandbox")
        self._own = threading.local()  # a sandbox ends with its thread
        self._sandboxes: list[Sandbox] = []

    async def passed(
        self, responses: Sequence[str], tests: Sequence[UnitTest | None]
    ) -> np.ndarray:
        """Return [n, m] bool: whether the program of a response passes a unit test. A response
        without a program passes none, and None is passed by no program. Equal programs, and equal
        unit tests, are run once."""
        programs = [program_of(read_response(response).answer) for response in responses]
        found = [program for program in dict.fromkeys(programs) if program is not None]
        different = [test for test in dict.fromkeys(tests) if test is not None]
        loop = asyncio.get_running_loop()
        rows = await asyncio.gather(
            *[loop.run_in_executor(self._threads, self._row, one, different) for one in found]
        )
        results = dict(zip(found, rows, strict=True))
        table = [
            [program is not None and results[program].get(test, False) for test in tests]
            for program in programs
        ]
        return np.array(table, dtype=bool).reshape(len(programs), len(tests))

    def _row(self, program: str, tests: Sequence[UnitTest]) -> dict[UnitTest | None, bool]:
        """Return whether the program passes each unit test, run in this thread."""
        sandbox = getattr(self._own, "sandbox", None)
        if sandbox is None:
            sandbox = self._own.sandbox = Sandbox()
            self._sandboxes.append(sandbox)
        found: dict[UnitTest | None, bool] = {}
        for number, test in enumerate(tests, start=1):
            said = sandbox.run(program, test.given, self._limits, goes_on=number < len(tests))
            found[test] = said.code == 0 and same_output(said.stdout, test.wanted)
            if said.why == "timeout":
                break
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the programs that are running, and end the sandboxes."""
        self._threads.shutdown(cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()
