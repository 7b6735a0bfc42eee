"""A program judged by tests that are run in the sandbox."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from hybridflow.rewards.sandbox import Limits, Sandbox
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@verifier("code", data_sources=["codecontests", "apps", "codeforces", "taco", "programs"])
def code(
    response: str, ground_truth: str | Mapping[str, Any], *, partial_credit: bool = True, test_timeout_s: float = 6.0
) -> ScoreResult:
    """The share of tests that the last Python block of the response passes.

    Args:
        response: text with the program in a fenced block.
        ground_truth: {"inputs": [...], "outputs": [...]}, or the same as JSON. Without "fn_name" an input is the
            program's standard input and an output what it must print, white space at the ends of lines aside. With it
            an input is the list of arguments of this function or method of `Solution` (or JSON, an argument a line),
            and an output its result.
        partial_credit: False counts 1.0 for all tests passed, else 0.0. The first test that fails then ends it.
        test_timeout_s: wall clock of a test.

    Returns:
        extra: `passed` and `tests` (counts), `failed_with` (how the first failing test ended).

    Raises:
        ValueError: the ground truth is none.
        ResourceError: this machine forbids what the sandbox needs.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    blocks = _BLOCK.findall(response)
    if not blocks:
        return ScoreResult(0.0, {"passed": 0, "tests": len(inputs), "failed_with": "no program"})
    passed, failed_with = 0, None
    limits = Limits(timeout_s=test_timeout_s)
    for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True), start=1):
        said = _failure(blocks[-1], given, wanted, tests.get("fn_name"), limits, goes_on=number < len(inputs))
        passed += said is None
        failed_with = failed_with or said
        if said and not partial_credit:
            break
    score = passed / len(inputs) if partial_credit else float(passed == len(inputs))
    return ScoreResult(score, {"passed": passed, "tests": len(inputs), "failed_with": failed_with})


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


def _failure(
    program: str, given: Any, wanted: Any, function: str | None, limits: Limits, *, goes_on: bool
) -> str | None:
    """How one test failed, or None."""
    if function:
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        given = json.dumps([function, arguments])
    elif not isinstance(given, str):
        given = "\n".join(map(str, given))
    result = _sandbox().run(program, given, limits, calls=bool(function), goes_on=goes_on)
    if result.why or result.code:
        return result.why or (result.stderr.strip().splitlines() or [f"exit code {result.code}"])[-1][:200]
    if function:
        try:
            found = json.loads(result.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return "no result"
        expected = json.loads(wanted) if isinstance(wanted, str) else wanted
        # outputs of public data sets are often lists of one
        right = found == expected or (isinstance(expected, list) and len(expected) == 1 and found == expected[0])
        return None if right else "another result"
    expected = wanted if isinstance(wanted, str) else "\n".join(map(str, wanted))
    return None if _lines(result.stdout) == _lines(expected) else "another output"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
