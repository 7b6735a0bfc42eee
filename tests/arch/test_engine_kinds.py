"""Only its own room knows a kind of engine: elsewhere no name and no string says it, comments and
docstrings apart."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.arch.files import ROOT, nodes

PACKAGE = ROOT / "hybridflow"
KINDS = ("sglang", "vllm")
ALLOWED = {  # (kind, file): how often its strings say it
    ("sglang", "config/schema.py"): 1,  # the default of rollout.engine
    ("sglang", "observe/environment.py"): 1,  # whose version a run folder records
    # verl's names of engines, and the one that they become
    ("sglang", "migrate/verl.py"): 5,
    ("vllm", "migrate/verl.py"): 3,
}


def mentions(source: str, kind: str) -> list[str]:
    """Identifiers, imported modules and strings that name the kind, each with its line."""
    return [f"{line}: {word}" for line, word in words(source) if kind in word.lower()]


@functools.cache
def words(source: str) -> tuple[tuple[int, str], ...]:
    """Line and text of all identifiers, imported modules and strings."""
    documentation = {
        id(node.body[0].value)
        for node in nodes(source)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    found = []
    for node in nodes(source):
        if id(node) in documentation:
            continue
        found += [
            (getattr(node, "lineno", 0), value)
            for field in ("id", "attr", "name", "asname", "arg", "module", "value")
            if isinstance(value := getattr(node, field, None), str)
        ]
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_engine_is_named_in_its_own_room_alone(kind: str) -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(f"engines/{kind}/"):
            continue
        here = mentions(path.read_text(encoding="utf-8"), kind)
        if len(here) != ALLOWED.get((kind, file), 0):
            found[file] = here
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import sglang",
        "from hybridflow.engines.sglang import client",
        "from hybridflow.engines import sglang as engine",
        "def start_sglang(): ...",
        "x = f'{kind} of SGLang'",
        "class A:\n    sglang_args: int = 0",
        "f(sglang=1)",
        "x.sglang",
    ],
)
def test_the_check_sees_every_mention(line: str) -> None:
    assert mentions(line, "sglang")
    assert not mentions(f'"""SGLang."""\n# {line.splitlines()[0]}', "sglang")
