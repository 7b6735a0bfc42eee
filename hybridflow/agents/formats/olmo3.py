"""OLMo 3's call format: Python calls with literal keyword arguments, one call per line, enclosed in
<function_calls>. true, false and null are written as in JSON."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import MOST_CALLS, Call, call_format
from hybridflow.agents.formats.pythonic import MOST, call_of

_BEGIN = "<function_calls>"
_END = "</function_calls>"
_OF_JSON = {"true": True, "false": False, "null": None}


@call_format("olmo3")
def olmo3(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the calls between <function_calls> and the last end marker, or the end of the
    answer."""
    begin = text.find(_BEGIN)
    if begin < 0:
        return []
    end = text.rfind(_END, begin)
    if end < 0:
        end = len(text)
    begin += len(_BEGIN)
    span = (begin, end)
    lines = text[begin:end][:MOST].strip().split("\n")
    program = "\n".join(map(str.strip, lines))
    try:
        listed = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = f"expected one Python call per line ({error})"
        return [Call("", problem=problem, span=span)]
    return [_call(one, span) for one in listed[:MOST_CALLS]]


def _call(statement: ast.stmt, span: tuple[int, int]) -> Call:
    if not isinstance(statement, ast.Expr):
        return Call("", problem="a line contains something other than a call", span=span)
    for node in ast.walk(statement.value):
        if isinstance(node, ast.keyword):
            node.value = _constant(node.value)
        elif isinstance(node, ast.List):
            node.elts = list(map(_constant, node.elts))
        elif isinstance(node, ast.Dict):
            node.values = list(map(_constant, node.values))
    return call_of(statement.value, span)


def _constant(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name) and node.id in _OF_JSON:
        return ast.Constant(_OF_JSON[node.id])
    return node
