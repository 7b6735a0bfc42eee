"""A calculator for arithmetic expressions with numbers, + - * / // % ** and parentheses."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from hybridflow.agents.tools.base import tool

_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST_CHARACTERS = 200
_MOST = 10.0**100
_LARGEST_EXPONENT = 300


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
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        found: float = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        found = _power(_value(node.left), _value(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("this is not a valid arithmetic expression")
    if not abs(found) <= _MOST:
        raise ValueError("the value exceeds 1e100")
    return found


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > _LARGEST_EXPONENT or (base < 0 and not float(exponent).is_integer()):
        raise ValueError("this power is too large to compute")
    return base**exponent
