"""The direction of imports of docs/design.md, and who may import ray, megatron and sglang."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

from tests.arch.files import ROOT, nodes, python_files

OWNERS = {
    "ray": "single_controller",
    "megatron": "mcore",
    "sglang": "engines/sglang",
    "vllm": "engines/vllm",
}


def imported_names(source: str) -> set[str]:
    """Top-level packages that a file imports anywhere: at module scope, inside functions, or by
    name through importlib."""
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif (
            isinstance(node, ast.Call)
            and node.args
            and _called(node.func) in {"import_module", "__import__"}
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return {name.split(".")[0] for name in found}


def _called(function: ast.expr) -> str:
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def violations(package: Path) -> list[str]:
    """`file imports library` for each library imported outside the room that owns it."""
    found = []
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        names = imported_names(file.read_text(encoding="utf-8"))
        found += [
            f"{relative} imports {library}"
            for library, room in OWNERS.items()
            if library in names and not relative.as_posix().startswith(f"{room}/")
        ]
    return found


def test_each_heavy_library_is_imported_in_its_room_alone() -> None:
    assert violations(ROOT / "hybridflow") == []


@pytest.mark.parametrize(
    "line",
    [
        "import ray",
        "from ray.util import state",
        "def f():\n    import ray.util",
        "def f():\n    import importlib\n    return importlib.import_module('ray.util')",
        "x = __import__('ray')",
    ],
)
def test_the_check_sees_every_way_to_import(tmp_path: Path, line: str) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "actor.py").write_text(line)
    assert violations(tmp_path) == ["workers/actor.py imports ray"]
    (tmp_path / "workers").rename(tmp_path / "single_controller")
    assert violations(tmp_path) == []


@pytest.mark.slow
def test_the_rooms_import_downwards_only() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Rooms import downwards only KEPT" in result.stdout


def test_the_layer_contract_fails_on_an_upward_import(tmp_path: Path) -> None:
    """The contract is only worth something if it can fail: the same configuration over a package
    that breaks each rule once."""
    for file, line in {
        "__init__": "",
        "config/__init__": "def f():\n    import hybridflow.trainer\n",
        "trainer/__init__": "",
        "observe/__init__": "import hybridflow.data\n",
        "data/__init__": "",
        "mcore/__init__": "def f():\n    import sglang\n",
    }.items():
        path = tmp_path / "hybridflow" / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; "
        "lint_imports_command()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    for contract in (
        "Rooms import downwards only",
        "observe uses the lowest row alone",
        "sglang is imported in engines.sglang alone",
    ):
        assert f"{contract} BROKEN" in result.stdout


def circles(root: Path) -> list[list[str]]:
    """Modules of the package under `root` that import each other, also for types alone."""
    code = (
        "import sys, json, grimp; sys.path.insert(0, '.'); graph = grimp.build_graph('hybridflow', "
        "cache_dir=None, exclude_type_checking_imports=False); print(json.dumps([[a, b] for a in "
        "graph.modules for b in graph.find_modules_directly_imported_by(a)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    edges = networkx.DiGraph(json.loads(result.stdout))
    return [
        sorted(group) for group in networkx.strongly_connected_components(edges) if len(group) > 1
    ]


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(ROOT) == []


def test_the_check_sees_a_circle_of_types_alone(tmp_path: Path) -> None:
    (tmp_path / "hybridflow").mkdir()
    (tmp_path / "hybridflow" / "__init__.py").write_text("")
    (tmp_path / "hybridflow" / "a.py").write_text("import hybridflow.b")
    (tmp_path / "hybridflow" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hybridflow.a"
    )
    assert circles(tmp_path) == [["hybridflow.a", "hybridflow.b"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "hybridflow.cli.main",
        "hybridflow.config.load",
        "hybridflow.config.check",
        "hybridflow.errors",
        "hybridflow.dispatch",
    ],
)
def test_what_must_answer_at_once_imports_nothing_heavy(module: str) -> None:
    heavy = {"torch", "ray", "pyarrow", "hydra", "megatron", "sglang", "transformers"}
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_driver_loads_what_ranks_and_engines_need_only_in_them() -> None:
    """The driver names methods of worker classes; loading Megatron, which it never uses, would cost
    seconds a start."""
    code = (
        "import sys, hybridflow.trainer.app; print(sorted({'megatron', 'sglang', 'transformers'} & "
        "set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == "[]"


def _top_level_names(module: Path) -> set[str]:
    """Names that a module binds at its top level, under conditions too."""
    found = set()
    for node in nodes(module.read_text(encoding="utf-8")):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return found


def missing_imports(source: str) -> list[str]:
    """`module.name` for each name that a file imports from the package and that is not there."""
    missing = []
    for node in nodes(source):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in (
            "hybridflow",
            "tests",
        ):
            continue
        place = ROOT.joinpath(*node.module.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        known = _top_level_names(file) if file.is_file() else set()
        for alias in node.names:
            is_module = (place / f"{alias.name}.py").is_file() or (place / alias.name).is_dir()
            if alias.name not in known and not is_module:
                missing.append(f"{node.module}.{alias.name}")
    return missing


@pytest.mark.slow
def test_what_tests_and_benchmarks_import_from_the_package_exists() -> None:
    """mypy checks the package alone, and a test that cannot be imported is otherwise found after
    half an hour."""
    files = python_files("tests", "benchmarks", "hybridflow")
    assert len(files) > 500
    assert {
        str(file.relative_to(ROOT)): found
        for file in files
        if (found := missing_imports(file.read_text()))
    } == {}
    assert missing_imports("from hybridflow.process.private_folder import LONGEST") == [
        "hybridflow.process.private_folder.LONGEST"
    ]
