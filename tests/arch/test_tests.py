"""Shared code lies outside of test modules, every tiny model in `tests/models.py` (those of
published folders beside their files), and unit tests mirror the rooms."""

from __future__ import annotations

import ast

import pytest

from tests.arch.files import ROOT, nodes

TESTS = sorted((ROOT / "tests").rglob("*.py"))


def imported_test_modules(source: str) -> list[str]:
    """Modules named `test_...` or `conftest` that the source imports anywhere."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower()),
            ]
    modules = [name for name in found if name.startswith("tests.")]
    return [name for name in modules if name.rsplit(".", 1)[1].startswith(("test_", "conftest"))]


def model_sizes(source: str) -> list[int]:
    """Lines of dictionaries that say `hidden_size` and `num_hidden_layers`, hence describe a whole
    model."""
    both = {"hidden_size", "num_hidden_layers"}
    dictionaries = [node for node in nodes(source) if isinstance(node, ast.Dict)]
    return [
        node.lineno
        for node in dictionaries
        if both <= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        and len(node.keys) > 5
    ]


def test_no_test_module_imports_another() -> None:
    found = {
        str(path.relative_to(ROOT)): imported_test_modules(path.read_text(encoding="utf-8"))
        for path in TESTS
    }
    assert {path: modules for path, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.trainer.test_loop import World",
        "def f():\n    import tests.e2e.test_ppo",
        "from tests.unit.trainer import test_loop",
        "from tests.conftest import elsewhere",
    ],
)
def test_an_import_of_a_test_module_is_seen(line: str) -> None:
    assert imported_test_modules(line)
    assert not imported_test_modules(
        "from tests.unit.trainer.worlds import World\nfrom hybridflow import test_x"
    )


def test_whole_models_are_described_in_one_file() -> None:
    files = {ROOT / "tests" / "models.py", ROOT / "tests" / "published" / "configs.py"}
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in TESTS
        for line in model_sizes(path.read_text(encoding="utf-8"))
        if path not in files
    }
    assert found == set()
    assert model_sizes((ROOT / "tests" / "models.py").read_text(encoding="utf-8"))


def test_unit_tests_mirror_the_rooms() -> None:
    rooms = {
        path.parent.name
        for path in [*(ROOT / "hybridflow").glob("*/__init__.py"), ROOT / "kernels/__init__.py"]
    }
    folders = {path.parent.name for path in (ROOT / "tests" / "unit").glob("*/__init__.py")}
    assert folders - rooms == set()
