"""Rewards for unit tests written by a policy. They are determined by running programs on the unit
tests (CURE, Wang et al., arXiv 2506.03136).

For the programs l and the unit tests k written for a task, B[l, k] is 1 if program l passes unit
test k, and I[l] is 1 if it passes all ground-truth tests. The reward of unit test k is

    R[k] = -sum_l (1 - I[l]) B[l, k] + (prod_{l: I[l]=1} B[l, k]) sum_l (1 - I[l]).

A unit test that all correct programs pass counts as correct and is rewarded for each wrong program
that fails it; any other is penalized for each wrong program that passes it. The mean of R over the
unit tests, divided by the number of wrong programs, estimates

    mu = p_u (1 - p_01) - (1 - p_u) p_00

where p_u is the probability that a unit test is correct, and p_01 and p_00 are the probabilities
that a wrong program passes a correct and a wrong unit test. If programs are ranked by the number of
unit tests they pass, the probability that a correct program ranks above a wrong one (the reward
precision) is at least 1 - exp(-m mu^2 / 2) and approaches 1 as the number of tests m grows,
provided that mu is positive.
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
    """A unit test: the standard input of a program and its expected output."""

    given: str
    wanted: str


def unit_test_of(response: str) -> UnitTest | None:
    """Parse the unit test in a response: its last two fenced blocks, the input and the expected
    output. Returns None if either block is missing or was cut off, or if the expected output is
    empty."""
    blocks = fenced_blocks(read_response(response).answer)[-2:]
    if len(blocks) < 2 or not all(block.closed for block in blocks):
        return None
    given, wanted = blocks
    return UnitTest(f"{given.text}\n", wanted.text) if wanted.text.strip() else None


def unit_test_rewards(
    passed: np.ndarray, is_right: np.ndarray, is_test: np.ndarray
) -> tuple[np.ndarray, float | None]:
    """Return R for each unit test [m] and the estimate of mu.

    If no program or every program is correct, returns zeros and None: without a correct program
    there is no evidence of which unit tests are correct, and the empty product would count all of
    them as correct. A response that is not a unit test gets the lowest possible reward, because its
    reward by the formula, 0, would exceed that of a wrong unit test.

    Args:
        passed: [n, m] bool, True if the program passes the unit test.
        is_right: [n] bool, True if the program passes all ground-truth tests.
        is_test: [m] bool, True if the response is a unit test.
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
    """Runs programs on unit tests, in one sandbox per core. Use it as a context manager.

    Args:
        test_timeout_s: wall-clock limit for running a program on a unit test. After its first
            timeout, a program fails all remaining unit tests.

    Raises:
        ResourceError: this machine does not support the sandbox; raised by `passed`.
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
        """Return [n, m] bool, True where the program in response n passes unit test m. A response
        without a program passes no unit test, and no program passes a unit test that is None.
        Duplicate programs and duplicate unit tests are run only once."""
        programs = [program_of(read_response(response).answer) for response in responses]
        found = [program for program in dict.fromkeys(programs) if program is not None]
        different = [test for test in dict.fromkeys(tests) if test is not None]
        loop = asyncio.get_running_loop()
        rows = await asyncio.gather(
            *[loop.run_in_executor(self._threads, self._row, one, different) for one in found]
        )
        results = dict(zip(found, rows, strict=True))
        table = np.zeros((len(programs), len(tests)), dtype=bool)
        for row, program in enumerate(programs):
            if program is not None:
                table[row] = [results[program].get(test, False) for test in tests]
        return table

    def _row(self, program: str, tests: Sequence[UnitTest]) -> dict[UnitTest | None, bool]:
        """Return, for each unit test, whether the program passes it. Runs in the calling thread."""
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
        """Wait for running programs to finish, and close the sandboxes."""
        self._threads.shutdown(cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()
