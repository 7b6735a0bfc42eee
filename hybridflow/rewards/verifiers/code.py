"""A program judged by tests that are run in the sandbox."""

from __future__ import annotations

import ast
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.program_tests import ProgramTest, read_tests
from hybridflow.rewards.reading import Block, fenced_blocks, read_response
from hybridflow.rewards.sandbox import Limits, Sandbox
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_LABELS = ("python", "py", "python3", "python2", "py3")
# of the deadline of a call that tests may use, so that what has passed is still reported
_SHARE = 0.9


def _plausible(ground_truth: Any) -> None:
    """Refuse what cannot hold tests, without reading megabytes of them."""
    if not isinstance(ground_truth, (str, Mapping, Sequence)) or not ground_truth:
        raise ValueError(f"the ground truth {ground_truth!r} holds no tests")


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
    """The share of tests that the program of the response passes.

    The program is the last fenced block with a label of Python, or without any the last one without
    a label. A block that never ends was cut, and is no program. The sandbox has the standard
    library and numpy; `failed_with` names a module that a program misses.

    Args:
        response: text with the program in a fenced block.
        ground_truth: one of these, or JSON of it. {"inputs": [...], "outputs": [...]}: an input is
            the program's standard input and an output what it must print, token by token; numbers
            with a decimal point within 1e-6. A list of {"input", "output"} is the same. With
            "fn_name" an input is the list of arguments of this function or method of `Solution` (or
            JSON, an argument a line), and an output its result. {"asserts": [...]} (or "test_list",
            as in MBPP, or the list alone, or its text): each assert is a test. {"test": ...,
            "entry_point": ...}, as in HumanEval: the asserts of its `check`. "setup" (or
            "test_setup_code", "test_imports") runs before each.
        partial_credit: False counts 1.0 for all tests passed, else 0.0. The first test that fails
            then ends it.
        test_timeout_s: wall clock of a test.
        max_slow_tests: after so many tests that ran out of time the rest count as failed.
        timeout_s: deadline of the call. Tests that it leaves no time for count as failed, and the
            others count.
        thinking_open: whether the prompt opened the thinking.

    Returns:
        extra: `passed` and `tests` (counts), `failed_with` (how the first failing test ended).

    Raises:
        ValueError: the ground truth holds no tests.
        ResourceError: this machine forbids what the sandbox needs.
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
    """The program of an answer, or None."""
    blocks = fenced_blocks(answer)
    labelled = [block for block in blocks if block.label in _LABELS]
    chosen = labelled or [block for block in blocks if not block.label]
    return _whole(chosen[-1]) if chosen and chosen[-1].closed else None


def _whole(block: Block) -> str:
    """The text of a block; where it is no Python and a longer one is, a fence was part of the
    program."""
    return next((text for text in (block.text, *block.longer) if _is_python(text)), block.text)


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
    """How one test failed, or None."""
    result = _sandbox().run(
        program, test.given, Limits(timeout_s=timeout_s), calls=test.calls, goes_on=goes_on
    )
    if result.why or result.code:
        return (
            result.why
            or (result.stderr.strip().splitlines() or [f"exit code {result.code}"])[-1][:200]
        )
    return test.judge(result.stdout)
