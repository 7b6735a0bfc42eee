"""Verifier for programs: runs their tests in the sandbox."""

from __future__ import annotations

import ast
import functools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.program_tests import ProgramTest, read_tests
from hybridflow.rewards.reading import Block, fenced_blocks, read_response
from hybridflow.rewards.sandbox import Limits, Sandbox
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_LABEL = re.compile(r"(?:python|py)[\d.]{0,8}")
# share of a call's deadline that tests may use, so that passed tests are still reported
_SHARE = 0.9


def _plausible(ground_truth: Any) -> None:
    """Reject values that cannot contain tests, without parsing megabytes of data."""
    if not isinstance(ground_truth, (str, Mapping, Sequence)) or not ground_truth:
        raise ValueError(f"the ground truth {ground_truth!r} contains no tests")


@verifier(
    "code",
    data_sources=["codecontests", "apps", "codeforces", "taco", "programs", "mbpp", "humaneval"],
    truth=_plausible,
)
def code(
    response: str,
    ground_truth: str | Mapping[str, Any] | Sequence[Any],
    *,
    partial_credit: bool = True,
    test_timeout_s: float = 6.0,
    max_slow_tests: int = 3,
    timeout_s: float | None = None,
    thinking_open: bool | None = None,
) -> ScoreResult:
    """Return the fraction of tests that the response's program passes.

    The program is the last fenced block labelled as Python, or else the last block without a label.
    An unclosed block was cut off and does not count. The sandbox provides the standard library and
    numpy. If a program imports any other module, `failed_with` names it.

    Args:
        response: text that contains the program in a fenced block.
        ground_truth: one of these formats, as an object or as JSON text. {"inputs": [...],
            "outputs": [...]}: each input is passed to the program as standard input, and its output
            is compared with the expected output token by token; numbers with a decimal point must
            agree within 1e-6. A list of {"input", "output"} is equivalent. With "fn_name", an input
            is the list of arguments (or JSON, one argument per line) for this function or method of
            `Solution`, and an output is the expected result. {"asserts": [...]} (or "test_list", as
            in MBPP, or just the list, or the asserts as text): each assert is a test. {"test": ...,
            "entry_point": ...}, as in HumanEval: each assert in `check` is a test. "setup" (or
            "test_setup_code", "test_imports") runs before each test.
        partial_credit: if False, return 1.0 if all tests pass, else 0.0, and stop at the first
            failing test.
        test_timeout_s: wall-clock limit per test.
        max_slow_tests: after this many timeouts, the remaining tests count as failed.
        timeout_s: time limit for the whole call. Tests that do not run in time count as failed.
        thinking_open: True if the prompt ended inside a thinking block.

    Returns:
        extra: `passed` and `tests` (counts), `failed_with` (reason of the first failure).

    Raises:
        ValueError: the ground truth contains no tests.
        ResourceError: this machine does not support the sandbox.
    """
    ends = None if timeout_s is None else time.monotonic() + _SHARE * timeout_s
    tests = read_tests(ground_truth)
    text = program_of(read_response(response, bool(thinking_open)).answer)
    if text is None:
        return ScoreResult(0.0, {"passed": 0, "tests": len(tests), "failed_with": "no program"})
    passed = slow = 0
    failed_with = None
    for number, test in enumerate(tests, start=1):
        left = test_timeout_s if ends is None else min(test_timeout_s, ends - time.monotonic())
        said = (
            _failure(text, test, left, goes_on=number < len(tests)) if left > 0 else "no time left"
        )
        passed += said is None
        slow += said == "timeout"
        failed_with = failed_with or said
        if said and (not partial_credit or slow >= max_slow_tests or left <= 0):
            break
    score = passed / len(tests) if partial_credit else float(passed == len(tests))
    return ScoreResult(score, {"passed": passed, "tests": len(tests), "failed_with": failed_with})


def program_of(answer: str) -> str | None:
    """Return the program in an answer, or None."""
    blocks = fenced_blocks(answer)
    labelled = [block for block in blocks if _LABEL.fullmatch(block.label)]
    chosen = labelled or [block for block in blocks if not block.label]
    return _whole(chosen[-1]) if chosen and chosen[-1].closed else None


def _whole(block: Block) -> str:
    """Return the program in a block. If the text is not valid Python, but a longer version that
    extends to a later fence is, return the longer version, because the program itself contains a
    fence.
    """
    return next(filter(_is_python, (block.text, *block.longer)), block.text)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


def _failure(program: str, test: ProgramTest, timeout_s: float, *, goes_on: bool) -> str | None:
    """Run one test. Returns the reason if it fails, else None."""
    result = _sandbox().run(
        program, test.given, Limits(timeout_s=timeout_s), calls=test.calls, goes_on=goes_on
    )
    if result.why or result.code:
        return (
            result.why
            or (result.stderr.strip().splitlines() or [f"exit code {result.code}"])[-1][:200]
        )
    return test.judge(result.stdout)
