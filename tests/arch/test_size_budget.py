"""Functions stay small, classes short and lines sparse, so that code is read at one go.

Functions are measured by their AST nodes: a formatter changes lines, and nodes stay the same. The
bounds of hybridflow only go down, to the targets noted next to them.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.arch.files import ROOT, nodes
from tests.arch.measures import function_sizes, measure, rates

MAX_METHODS = 40
MAX_NODES = 350  # of a function
LARGE_FUNCTIONS = 90  # of hybridflow have more; target 0
LARGEST_FUNCTION = 871  # nodes; target MAX_NODES
BOUNDS = {
    "tokens": 5.75,  # per line; target 5.5
    "parallel": 0.5,  # `a, b = x, y` per 1,000 lines; target 3
    "comprehensions": 17.5,  # per 1,000 lines
    "wide": 0.0,  # lines of 110 columns or more per 1,000 lines; target 0
}


def functions_over(folder: Path, limit: int) -> list[tuple[int, str]]:
    """(nodes, `file:function:line`) of the functions with more than `limit` nodes, the largest
    first."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for function, size in function_sizes(file).items():
            if size > limit:
                found.append((size, f"{file.relative_to(folder)}:{function}"))
    return sorted(found, reverse=True)


def classes_over(folder: Path, limit: int) -> list[str]:
    """`file:class: N methods` of the classes with more than `limit` methods."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for node in nodes(file.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                methods = sum(
                    isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) for item in node.body
                )
                if methods > limit:
                    found.append(f"{file.relative_to(folder)}:{node.name}: {methods} methods")
    return found


def test_functions_are_within_the_budget() -> None:
    large = functions_over(ROOT / "hybridflow", MAX_NODES)
    assert len(large) <= LARGE_FUNCTIONS, large
    assert large[0][0] <= LARGEST_FUNCTION, large[0]


def test_classes_are_within_the_budget() -> None:
    assert classes_over(ROOT / "hybridflow", MAX_METHODS) == []


@pytest.mark.slow
def test_lines_are_sparse() -> None:
    counts: Counter[str] = Counter()
    for file in (ROOT / "hybridflow").rglob("*.py"):
        counts.update(measure(file))
    measured = rates(counts)
    assert measured.keys() == BOUNDS.keys()
    assert {name: rate for name, rate in measured.items() if rate > BOUNDS[name]} == {}


def test_the_budget_sees_large_functions_and_classes(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text("def f():\n" + "    x = 1\n" * 2)  # each line: 4 nodes
    (tmp_path / "methods.py").write_text("class C:\n" + "    def f(self): ...\n" * 3)
    assert functions_over(tmp_path, limit=9) == [(10, "function.py:f:1")]
    assert functions_over(tmp_path, limit=10) == []
    assert classes_over(tmp_path, limit=2) == ["methods.py:C: 3 methods"]
    assert classes_over(tmp_path, limit=3) == []


def test_the_measures_count_what_they_name(tmp_path: Path) -> None:
    file = tmp_path / "dense.py"
    file.write_text(
        "a, b = 1, 2\nc = [x for x in {y for y in a}]\n" + f"d = {'1' * 106}\n" + "a, b = b\n"
    )
    counts = measure(file)
    assert (counts["lines"], counts["parallel"], counts["comprehensions"], counts["wide"]) == (
        4,
        1,
        2,
        1,
    )
    assert rates(counts) == {
        "tokens": 30 / 4,
        "parallel": 250,
        "comprehensions": 500,
        "wide": 250,
    }
