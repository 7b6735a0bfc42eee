"""The call format of Llama 4 and LFM2: a list of Python calls with literal keyword arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence

from hybridflow.agents.formats.base import MOST_CALLS, Call, call_format

_START = re.compile(r"<\|(?:python|tool_call)_start\|>")
_END = re.compile(r"<\|(?:python|tool_call)_end\|>")
_LIST = re.compile(r"\s*+\[\s*+(?P<name>[A-Za-z_]\w*+)\(")
MOST = 100_000  # characters of a list that are parsed


@call_format("pythonic")
def pythonic(text: str, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the list of calls between <|python_start|> or <|tool_call_start|> and the last end
    marker, or the whole answer. Without markers, a list whose first call does not name a tool is a
    plain answer."""
    started = _START.search(text)
    begin = started.end() if started else 0
    first = _LIST.match(text, begin)
    if first is None or (started is None and first["name"] not in tools):
        return []
    ends = [marker.start() for marker in _END.finditer(text, begin)]
    end = ends[-1] if ends else len(text)
    span = (begin, end)
    program = text[begin:end][:MOST].strip()
    try:
        listed = ast.parse(program, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = f"expected a list of Python calls ({error})"
        return [Call(first["name"], problem=problem, span=span)]
    calls = listed.elts if isinstance(listed, ast.List) else [listed]
    return [call_of(one, span) for one in calls[:MOST_CALLS]]


def call_of(node: ast.expr, span: tuple[int, int]) -> Call:
    """Convert an expression to a call. Its problem is set if the expression is not a call, or if
    an argument is positional or not a literal."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Call("", problem="the list contains something other than calls", span=span)
    name = node.func.id
    arguments = dict[str, object]()
    problem = ""
    for one in node.keywords:
        try:
            arguments[str(one.arg)] = _literal(one.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            problem = f"the argument {one.arg} of {name} must be a literal"
    if node.args:
        problem = f"the arguments of {name} must be passed by name"
    return Call(name, arguments, problem, span=span)


def _literal(node: ast.expr) -> object:
    """Evaluate a literal with JSON-compatible types. Raises ValueError or TypeError for any other
    expression.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | None):
        return node.value
    return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
