"""Every public function, class and method of the package has a caller: in the package, the
benchmarks, a document, or a test of several processes or of whole runs. What only its own unit test
calls has no user."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.arch.files import ROOT, nodes, parse, python_files

Definition = tuple[str, int]  # name, line
# Bases of ours in all but their place: methods of a class with any other base from outside may be
# called from there.
OWN_BASES = {
    "Protocol",
    "Generic",
    "Enum",
    "IntEnum",
    "StrEnum",
    "NamedTuple",
    "TypedDict",
    "ABC",
    "Exception",
}
# Name -> who calls it.
CALLED_FROM_OUTSIDE = {
    "record_event": "Megatron, on the stand-in for torch.cuda's streams",
    "wait_event": "Megatron, on the stand-in for torch.cuda's streams",
    "wait_stream": "Megatron, on the stand-in for torch.cuda's streams",
    "elapsed_time": "Megatron, on the stand-in for torch.cuda's events",
    "get_replay_topk": "Megatron's routers (moe/moe_utils.py)",
    "backward_dw": "Megatron's schedules, on every linear",
    "process_mm_data_async": "SGLang, on its image processor (managers/tokenizer_manager.py)",
    "clear_preprocess_cache": "SGLang, on its image processor (managers/tokenizer_manager.py)",
}


def definitions(source: str, package_classes: set[str]) -> Iterator[Definition]:
    """Public functions, classes and methods, but for registered entries and what overrides a method
    from outside."""

    def visit(body: Sequence[ast.stmt], called_by_others: bool) -> Iterator[Definition]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if not node.name.startswith("_") and not called_by_others and not _is_entry(node):
                    yield node.name, node.lineno
            elif isinstance(node, ast.ClassDef):
                if not node.name.startswith("_") and not _is_entry(node):
                    yield node.name, node.lineno
                bases = {_last_name(base) for base in node.bases}
                yield from visit(node.body, bool(bases - package_classes - OWN_BASES))
            elif isinstance(node, (ast.If, ast.Try)):
                yield from visit(node.body, called_by_others)

    yield from visit(parse(source).body, called_by_others=False)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _is_entry(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator with arguments hands it to a registry; those of methods and dataclasses
    do not."""
    return any(
        isinstance(call, ast.Call)
        and _last_name(call.func) not in {"register", "needs", "lru_cache", "dataclass"}
        for call in node.decorator_list
    )


def uses(source: str) -> Counter[str]:
    """How often each name is read, imported, or part of a string that names it (`module:name`,
    `getattr`)."""
    found: Counter[str] = Counter()
    docstrings = {
        node.body[0].value
        for node in nodes(source)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(next(iter(node.body), None), ast.Expr)
    }
    for node in nodes(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found[node.attr] += 1
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
        ):
            found.update(re.findall(r"^\w+$|(?<=[.:])\w+", node.value))
    return found


def unused(package: Path, callers: Sequence[Path], documents: Sequence[Path]) -> list[str]:
    """`file:line name` of what nobody calls."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    classes = {
        node.name
        for text in sources.values()
        for node in nodes(text)
        if isinstance(node, ast.ClassDef)
    }
    used: Counter[str] = Counter()
    for text in (*sources.values(), *(path.read_text(encoding="utf-8") for path in callers)):
        used.update(uses(text))  # `+=` would copy all counts for every file
    for path in documents:
        used.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return [
        f"{path.relative_to(package)}:{line} {name}"
        for path, text in sources.items()
        for name, line in definitions(text, classes)
        if not used[name] and name not in CALLED_FROM_OUTSIDE
    ]


@pytest.mark.slow
def test_every_public_name_has_a_caller() -> None:
    callers = python_files("benchmarks", "tests/dist", "tests/e2e")
    documents = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "setup.py"]
    assert unused(ROOT / "hybridflow", callers, [path for path in documents if path.exists()]) == []


def test_what_is_called_from_outside_is_there() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "hybridflow").rglob("*.py")
    )
    assert [name for name in CALLED_FROM_OUTSIDE if not re.search(rf"def {name}\b", text)] == []


def test_a_name_without_a_caller_is_found(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(
        "import enum\nfrom torch import nn\n\n\nclass A:\n    def used(self): ...\n    def "
        "idle(self): ...\n\n\n"
        "class B(nn.Module):\n    def forward(self): ...\n\n\ndef entry(): ...\n\n\n"
        "@estimator('x')\ndef mine(): ...\n\n\nB().x = A().used()\n"
    )
    assert unused(tmp_path, [], []) == ["room.py:7 idle", "room.py:14 entry"]
    (tmp_path / "caller.py").write_text("from room import entry\n\nentry()\nx = 'room:idle'\n")
    assert unused(tmp_path, [], []) == []
