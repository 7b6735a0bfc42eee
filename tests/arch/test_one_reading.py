"""Responses are read in one place: no other module has a pattern for a box, a fence or a marker of
thinking."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.arch.files import ROOT

READING = "hybridflow/rewards/reading.py"
# what writes them: calls of one format and answers of a task are fenced, prompts of data sets ask
# for a box and those of testers for fences, and chat templates are shown an answer with its thinking
OTHERS = {
    "hybridflow/agents/formats/deepseek.py",
    "hybridflow/data/chat_template.py",
    "hybridflow/data/prepare/published.py",
    "hybridflow/data/prepare/tasks/humaneval.py",
    "hybridflow/data/prepare/tasks/programs.py",
    "hybridflow/flows/cure.py",
}
MARKS = ("boxed", "fbox", "```", "~~~", "<think", "</think", "[THINK]")


def constants(tree: ast.Module) -> Iterator[str]:
    """The texts of a module that are no documentation."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield node.value


@pytest.mark.slow
def test_boxes_fences_and_thinking_are_read_in_one_module() -> None:
    found = [
        f"{name}: {text[:60]!r}"
        for file in sorted((ROOT / "hybridflow").rglob("*.py"))
        if (name := file.relative_to(ROOT).as_posix()) != READING and name not in OTHERS
        for text in constants(ast.parse(file.read_text(encoding="utf-8")))
        if any(mark in text for mark in MARKS)
    ]
    assert not found
