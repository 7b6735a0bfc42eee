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
_DECIMAL_MARKS = {".", "e", "E"}
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
    if isinstance(tests, Sequence) and tests:
        if all(isinstance(one, str) for one in tests):
            tests = {"asserts": tests}
        elif all(isinstance(one, Mapping) for one in tests):
            inputs = [one.get("input", "") for one in tests]
            outputs = [one.get("output", "") for one in tests]
            tests = {"inputs": inputs, "outputs": outputs}
    if not isinstance(tests, Mapping):
        raise ValueError(f"the ground truth {str(ground_truth)[:80]!r} contains no tests")
    setup = "\n".join(_lines_of(tests.get(name)) for name in _SETUPS)
    asserts = next((tests[name] for name in _ASSERTS if tests.get(name)), None)
    if asserts is not None:
        texts = [asserts] if isinstance(asserts, str) else asserts
        return [_of_assert(text, setup) for text in texts]
    check = tests.get("test")
    if isinstance(check, str):
        return _of_check(check, str(tests.get("entry_point", "")), setup)
    for name in ("inputs", "outputs"):
        if not isinstance(tests.get(name), Sequence):
            names = ", ".join(map(str, tests)) or "nothing"
            raise ValueError(f"the ground truth has no {name!r} (it has: {names})")
    inputs = tests["inputs"]
    outputs = tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs but {len(outputs)} outputs")
    make = _of_function(str(tests["fn_name"])) if tests.get("fn_name") else _of_program
    return list(map(make, inputs, outputs))


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if "assert" not in text:
            raise ValueError(
                f"the ground truth {text[:80]!r} is neither JSON nor Python with asserts"
            ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    are_asserts = all(line.startswith("assert") for line in lines)
    return {"asserts": lines if are_asserts else [text]}


def _lines_of(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value or ()))


# ---- standard input and output


def _of_program(given: Any, wanted: Any) -> ProgramTest:
    expected = _as_text(wanted)

    def judge(said: str) -> str | None:
        return None if same_output(said, expected) else "wrong output"

    return ProgramTest(_as_text(given), judge)


def _as_text(value: Any) -> str:
    return _lines_of(value) if isinstance(value, str | list | tuple) else str(value)


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
        one = Decimal(token)
        other = Decimal(wanted)
    except InvalidOperation:
        return False
    if not (one.is_finite() and other.is_finite()):
        return False
    if not _DECIMAL_MARKS.isdisjoint(wanted):
        return _is_close(one, other)
    return not _DECIMAL_MARKS.isdisjoint(token) and one == other


def _is_close(one: float | Decimal, other: float | Decimal) -> bool:
    return math.isclose(float(one), float(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


# ---- functions


def _of_function(name: str) -> Callable[[Any, Any], ProgramTest]:
    """Return a constructor for tests that call a function. Their input is a list of arguments, or
    text with one JSON argument per line."""

    _, _, function = name.rpartition(".")

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
            is_right = any(_same_value(found, one) for one in candidates)
            return None if is_right else "wrong result"

        return ProgramTest(json.dumps([function, arguments]), judge, calls=True)

    return make


def _json_or_text(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    is_truth = isinstance(expected, bool)
    if isinstance(found, float) and isinstance(expected, int | float) and not is_truth:
        return _is_close(found, expected)
    return bool(found == expected) and isinstance(found, bool) == is_truth


# ---- asserts


def _of_assert(text: str, setup: str) -> ProgramTest:
    """Build a test from Python source with one or more statements."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {text[:80]!r} is not valid Python: {error}") from error
    match tree.body:
        case [ast.Assert(test=condition)]:
            return _of_condition(condition, setup)
    return _statements(f"{setup}\n{text}")


def _of_condition(condition: ast.expr, setup: str) -> ProgramTest:
    match condition:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _result(f"{setup}\n_result = (bool({ast.unparse(operand)}))", False)
        case ast.Call():
            return _result(f"{setup}\n_result = (bool({ast.unparse(condition)}))", True)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            for side, other in ((left, right), (right, left)):
                value = _literal(other)
                if value is not None:
                    return _result(f"{setup}\n_result = ({ast.unparse(side)})", value[0])
    return _statements(f"{setup}\nassert {ast.unparse(condition)}")


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
    conditions = []
    has_others = False
    for node in check.body:
        match node:
            case ast.Assert():
                conditions.append(node.test)
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                has_others = True
    if not conditions or len(names) != 1 or has_others:
        return [_statements(f"{setup}\n{test}\ncheck({entry_point if names else ''})")]
    rest = "\n".join(ast.unparse(node) for node in tree.body if node is not check)
    setup = f"{setup}\n{rest}\n{names[0]} = {entry_point}"
    return [_of_condition(condition, setup) for condition in conditions]
