"""Files and functions stay short enough to be read at one go."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.arch.files import ROOT, nodes

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_METHODS = 40


def over_budget(folder: Path) -> list[str]:
    """`file: N lines`, `file:function: N lines` and `file:class: N methods` for what is too long."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{file.relative_to(folder)}: {lines} lines")
        for node in nodes(text):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{file.relative_to(folder)}:{node.name}: {length} lines")
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) for item in node.body)
                if methods > MAX_METHODS:
                    found.append(f"{file.relative_to(folder)}:{node.name}: {methods} methods")
    return found


def test_files_and_functions_are_within_budget() -> None:
    assert [line for folder in ("hybridflow", "tests", "requirements") for line in over_budget(ROOT / folder)] == []


def test_the_budget_sees_long_files_and_functions(tmp_path: Path) -> None:
    (tmp_path / "long_file.py").write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    (tmp_path / "long_function.py").write_text("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    (tmp_path / "long_class.py").write_text("class C:\n" + "    def f(self): ...\n" * (MAX_METHODS + 1))
    assert over_budget(tmp_path) == [
        "long_class.py:C: 41 methods",
        "long_file.py: 501 lines",
        "long_function.py:f: 81 lines",
    ]
    (tmp_path / "long_class.py").write_text("class C:\n" + "    def f(self): ...\n" * MAX_METHODS)
    (tmp_path / "long_file.py").write_text("x = 1\n" * MAX_FILE_LINES)
    (tmp_path / "long_function.py").write_text("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1))
    assert over_budget(tmp_path) == []
