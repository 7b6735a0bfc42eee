"""Static checks of a flow's source file for mistakes that a run would not reveal: a batch is
immutable, so a method call whose result is discarded has no effect."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hybridflow.batch import DataProto
from hybridflow.errors import FlowError
from hybridflow.flows.base import Body

# methods that only return a new batch; `fetch` is excluded because reading values can be intended
_MAKE_A_BATCH = {
    name
    for name, method in inspect.getmembers(DataProto, inspect.isfunction)
    if inspect.get_annotations(method).get("return") == "DataProto" and not name.startswith("_")
} - {"fetch"}
_OF_ANY = "with_columns"  # on any object
_OF_RUN = "leave_out"


def file_of(body: Body) -> str:
    """Return the path of a flow's source file, as recorded in its code object."""
    code = getattr(inspect.unwrap(body), "__code__", None)
    return "" if code is None else str(code.co_filename)


def text_of(body: Body) -> str:
    """Return the source text of a flow's file; an empty string if the flow was defined
    interactively."""
    path = Path(file_of(body))
    return path.read_text(errors="replace") if path.is_file() else ""


def dropped_result(text: str) -> FlowError | None:
    """Return the error for the first statement that creates a batch and discards it; None if there
    is none."""
    with suppress(SyntaxError):  # the file may have been edited since its import
        tree = ast.parse(text)
        batches = _batches(tree)
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        for node in statements:
            owner, method = _method(node.value) or ("", "")
            call = f"{owner}.{method}(...)"
            if method == _OF_RUN:
                return FlowError(
                    f"the result of {call} is dropped; write `batch = {call}`", line=node.lineno
                )
            if method == _OF_ANY or (method in _MAKE_A_BATCH and owner in batches):
                return FlowError(
                    f"a batch is immutable, but the result of {call} is dropped; write `{owner} = "
                    f"{call}`",
                    line=node.lineno,
                )
    return None


def _batches(tree: ast.Module) -> set[str]:
    """Return the names of the variables that are assigned a batch, i.e. the result of a call on the
    run or on a batch.
    """
    assigned = list(_assigned(tree))
    found: set[str] = set()
    size = -1
    while size != len(found):
        size = len(found)
        found |= {name for name, value in assigned if _is_batch(value, found)}
    return found


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _is_batch(value: ast.expr, batches: set[str]) -> bool:
    if isinstance(value, ast.Await):
        return _is_batch(value.value, batches)
    if isinstance(value, ast.Name):
        return value.id in batches
    owner, method = _method(value) or ("", "")
    return method in ("samples", "all", "advantages", _OF_RUN) or (
        method in _MAKE_A_BATCH and owner in batches
    )


def _method(value: ast.expr) -> tuple[str, str] | None:
    """Return the object and the method of a call like `batch.rows(index)`; None for anything
    else."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    owner = value.func.value
    return (owner.id, value.func.attr) if isinstance(owner, ast.Name) else None
