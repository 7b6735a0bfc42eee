"""A calculator for arithmetic expressions with numbers, + - * / // % ** and parentheses."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from hybridflow.agents.tools.base import tool

_MOST_CHARACTERS = 200
_MOST = 10.0**100
_LARGEST_EXPONENT = 300


def _power(base: float, exponent: float) -> float:
    is_complex = base < 0 and not float(exponent).is_integer()
    if abs(exponent) > _LARGEST_EXPONENT or is_complex:
        raise ValueError("this power is too large to compute")
    return base**exponent


_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


@tool("calculator", is_instant=True)
def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example (12 + 3) * 4 / 7.

    Raises:
        ValueError: it is not an arithmetic expression, or its value exceeds 1e100.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"an expression must have at most {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("this is not a valid arithmetic expression") from error
    value = _value(tree)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> float:
    """Compute an expression. Raises ValueError if it contains anything other than numbers and
    operations, or if the value is too large."""
    found: float
    match node:
        case ast.Constant(int() | float() as found) if not isinstance(found, bool):
            pass
        case ast.UnaryOp(ast.USub(), operand):
            found = -_value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            found = _value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            compute = _OPERATIONS[type(operation)]
            found = compute(_value(left), _value(right))
        case _:
            raise ValueError("this is not a valid arithmetic expression")
    if not abs(found) <= _MOST:
        raise ValueError("the value exceeds 1e100")
    return found
