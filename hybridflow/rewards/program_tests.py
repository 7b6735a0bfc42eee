"""Conversion of a dataset's program tests to sandbox inputs and expected results.

Expected values stay outside the sandbox, so a program cannot look them up: for `assert f(1) == 2`,
the sandbox evaluates `f(1)`, and the result is compared with 2 here.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_TOLERANCE = 1e-6  # relative and absolute, for numbers with a decimal point
# names used here, by sandbox services and by MBPP
_ASSERTS = ("asserts", "assert_case", "test_list")
_SETUPS = ("setup", "test_setup_code", "test_imports")


@dataclass(frozen=True)
class ProgramTest:
    """A test that runs a program once.

    Attributes:
        given: standard input for the program.
        judge: checks the output; returns the reason for a failure, or None.
        calls: True if the test calls a function of the program (`Sandbox.run`).
    """

    given: str
    judge: Callable[[str], str | None]
    calls: bool = False


def read_tests(ground_truth: Any) -> list[ProgramTest]:
    """Parse the tests of a ground truth. `verifiers.code` documents the formats.

    Raises:
        ValueError: the ground truth has none of the documented formats, or contains no tests.
    """
    tests = _from_text(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(tests, Sequence) and tests and all(isinstance(one, str) for one in tests):
        tests = {"asserts": tests}
    elif isinstance(tests, Sequence) and tests and all(isinstance(one, Mapping) for one in tests):
        tests = {
            "inputs": [one.get("input", "") for one in tests],
            "outputs": [one.get("output", "") for one in tests],
        }
    if not isinstance(tests, Mapping):
        raise ValueError(f"the ground truth {str(ground_truth)[:80]!r} contains no tests")
    setup = "\n".join(_lines_of(tests.get(name)) for name in _SETUPS)
    asserts = next((tests[name] for name in _ASSERTS if tests.get(name)), None)
    if asserts is not None:
        texts = [asserts] if isinstance(asserts, str) else asserts
        return [_of_assert(text, setup) for text in texts]
    if isinstance(tests.get("test"), str):
        return _of_check(tests["test"], str(tests.get("entry_point", "")), setup)
    missing = [name for name in ("inputs", "outputs") if not isinstance(tests.get(name), Sequence)]
    if missing:
        raise ValueError(
            f"the ground truth has no {missing[0]!r} (it has: "
            f"{', '.join(map(str, tests)) or 'nothing'})"
        )
    inputs = tests["inputs"]
    outputs = tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs but {len(outputs)} outputs")
    make = _of_function(str(tests["fn_name"])) if tests.get("fn_name") else _of_program
    return [make(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if "assert" not in text:
            raise ValueError(
                f"the ground truth {text[:80]!r} is neither JSON nor Python with asserts"
            ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    return {"asserts": lines if all(line.startswith("assert") for line in lines) else [text]}


def _lines_of(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value or ()))


# ---- standard input and output


def _of_program(given: Any, wanted: Any) -> ProgramTest:
    expected = _lines_of(wanted) if isinstance(wanted, (str, list, tuple)) else str(wanted)
    text = _lines_of(given) if isinstance(given, (str, list, tuple)) else str(given)
    return ProgramTest(text, lambda said: None if same_output(said, expected) else "wrong output")


def same_output(said: str, expected: str) -> bool:
    """Compare the tokens of two outputs. Numbers with a decimal point are compared with a
    tolerance. An expected integer such as 4 also matches 4.0, but without a tolerance."""
    tokens = said.split()
    wanted = expected.split()
    return len(tokens) == len(wanted) and all(map(_same_token, tokens, wanted))


def _same_token(token: str, wanted: str) -> bool:
    if token == wanted:
        return True
    try:
        one, other = Decimal(token), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (one.is_finite() and other.is_finite()) or not {".", "e", "E"} & {*token, *wanted}:
        return False
    if not {".", "e", "E"} & set(wanted):
        return one == other
    return math.isclose(float(one), float(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


# ---- functions


def _of_function(name: str) -> Callable[[Any, Any], ProgramTest]:
    """Return a constructor for tests that call a function. Their input is a list of arguments, or
    text with one JSON argument per line."""

    def make(given: Any, wanted: Any) -> ProgramTest:
        if isinstance(given, str):
            arguments = list(map(_json_or_text, given.splitlines()))
        else:
            arguments = list(given)
        expected = _json_or_text(wanted)
        candidates = [expected]
        if isinstance(wanted, str):
            candidates.append(wanted)
        # outputs of public datasets are often lists of one element
        if isinstance(expected, list) and len(expected) == 1:
            candidates += [expected[0], _json_or_text(expected[0])]

        def judge(said: str) -> str | None:
            try:
                found = json.loads(said.strip().splitlines()[-1])
            except (ValueError, IndexError, RecursionError):
                return "no result"
            return None if any(_same_value(found, one) for one in candidates) else "wrong result"

        return ProgramTest(json.dumps([name.rpartition(".")[2], arguments]), judge, calls=True)

    return make


def _json_or_text(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    if (
        isinstance(found, float)
        and isinstance(expected, (int, float))
        and not isinstance(expected, bool)
    ):
        return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(found == expected) and isinstance(found, bool) == isinstance(expected, bool)


# ---- asserts


def _of_assert(text: str, setup: str) -> ProgramTest:
    """Build a test from Python source with one or more statements."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {text[:80]!r} is not valid Python: {error}") from error
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert):
        return _of_condition(tree.body[0].test, setup)
    return _statements(f"{setup}\n{text}")


def _of_condition(condition: ast.expr, setup: str) -> ProgramTest:
    expected: Any = True
    expression = ast.unparse(condition)
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        expression = f"bool({ast.unparse(condition.operand)})"
        expected = False
    elif isinstance(condition, ast.Call):
        expression = f"bool({expression})"
    elif (
        isinstance(condition, ast.Compare)
        and len(condition.ops) == 1
        and isinstance(condition.ops[0], ast.Eq | ast.Is)
    ):
        for side, other in (
            (condition.left, condition.comparators[0]),
            (condition.comparators[0], condition.left),
        ):
            value = _literal(other)
            if value is not None:
                return _result(f"{setup}\n_result = ({ast.unparse(side)})", value[0])
        return _statements(f"{setup}\nassert {expression}")
    else:
        return _statements(f"{setup}\nassert {expression}")
    return _result(f"{setup}\n_result = ({expression})", expected)


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _result(statements: str, expected: Any) -> ProgramTest:
    def judge(said: str) -> str | None:
        try:
            found = ast.literal_eval(json.loads(said.strip().splitlines()[-1]))
        except (ValueError, TypeError, SyntaxError, IndexError, RecursionError, MemoryError):
            return "no result"
        return None if found == expected else "wrong result"

    return ProgramTest(json.dumps(statements), judge, calls=True)


def _statements(text: str) -> ProgramTest:
    """Build a test that checks that the statements run to completion. The result of the test is a
    random value that the program cannot guess.
    """
    mark = secrets.token_hex(16)
    return _result(f"{text}\n_result = {mark!r}", mark)


def _of_check(test: str, entry_point: str, setup: str) -> list[ProgramTest]:
    """Build tests from HumanEval's format: a function `check` that makes assertions about its
    argument. Each assert is a separate test if `check` contains nothing else."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {test[:80]!r} is not valid Python: {error}") from error
    check = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"),
        None,
    )
    if check is None:
        return [_of_assert(test, setup)]
    if not entry_point.isidentifier():
        raise ValueError(
            f"entry_point={entry_point!r} must be a function name, because the test's `check` is "
            "called with that function"
        )
    names = [argument.arg for argument in check.args.args]
    asserts = [node for node in check.body if isinstance(node, ast.Assert)]
    others = [node for node in check.body if not isinstance(node, ast.Assert | ast.Pass)]
    if (
        not asserts
        or len(names) != 1
        or not all(
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in others
        )
    ):
        return [_statements(f"{setup}\n{test}\ncheck({entry_point if names else ''})")]
    rest = "\n".join(ast.unparse(node) for node in tree.body if node is not check)
    return [
        _of_condition(node.test, f"{setup}\n{rest}\n{names[0]} = {entry_point}") for node in asserts
    ]
