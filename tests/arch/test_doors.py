"""What a room keeps to itself: the modules of the batch, the words `torch.cuda`, and the clock on
the wall."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.arch.files import ROOT, nodes, python_files

# Megatron calls torch.cuda where there is no CUDA; this module gives those calls something to find.
SAYS_CUDA = ("device/", "mcore/cpu_compat.py")
# Everything else waits and measures by the monotonic clock, which no administrator and no time
# server moves.
READS_THE_DATE = {
    "agents/completion_answer.py": "the door's `created`",
    "bench/measurements/steps.py": "compared with `wall_time` of another process",
    "bench/run.py": "when a suite began",
    "launch/bad_nodes.py": "when a node was excluded, for jobs of other days",
    "launch/node.py": "when a node failed",
    "launch/preflight.py": "the clock that is compared with the other nodes'",
    "observe/timeline.py": "where a phase lies in the report",
    "observe/tracker.py": "`wall_time` of a record",
    "observe/trackers/tensorboard.py": "`wall_time` of an event",
    "observe/spans.py": "when a span began, on a timeline of several machines",
    "saving/store.py": "the name of a folder that is put aside",
    "single_controller/cluster.py": (
        "the age of a folder that a killed driver left; its lock decides"
    ),
}


@functools.cache
def modules_named(source: str) -> frozenset[str]:
    """Dotted names that a file imports or reads: `a.b` for `import a.b`, `from a import b` and the
    expression `a.b`."""
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return frozenset(found)


def through_the_wall(folder: Path, submodules: set[str], files: Iterable[Path]) -> list[str]:
    """`file imports module` for each import of a module inside hybridflow/batch from outside of
    it."""
    inside = {f"hybridflow.batch.{name}" for name in submodules}
    return [
        f"{file.relative_to(folder)} imports {name}"
        for file in files
        if not file.relative_to(folder).as_posix().startswith(("batch/", "hybridflow/batch/"))
        for name in sorted(modules_named(file.read_text(encoding="utf-8")) & inside)
    ]


def who_says_cuda(package: Path) -> list[str]:
    """Files outside of the device's room that name `torch.cuda`."""
    return [
        file.relative_to(package).as_posix()
        for file in sorted(package.rglob("*.py"))
        if not file.relative_to(package).as_posix().startswith(SAYS_CUDA)
        and any(
            name.startswith("torch.cuda")
            for name in modules_named(file.read_text(encoding="utf-8"))
        )
    ]


SUBMODULES = {path.stem for path in (ROOT / "hybridflow" / "batch").glob("[a-z]*.py")}


@pytest.mark.parametrize(
    "folder", ["hybridflow", pytest.param("tests", marks=pytest.mark.slow), "benchmarks"]
)
def test_the_batch_is_imported_through_its_door(folder: str) -> None:
    assert len(SUBMODULES) > 3
    assert through_the_wall(ROOT / folder, SUBMODULES, python_files(folder)) == []


def test_the_device_is_asked_in_one_room() -> None:
    assert who_says_cuda(ROOT / "hybridflow") == []


def test_deadlines_do_not_follow_the_clock_on_the_wall() -> None:
    package = ROOT / "hybridflow"
    found = {
        file.relative_to(package).as_posix()
        for file in python_files("hybridflow")
        if modules_named(file.read_text(encoding="utf-8"))
        & {"time.time", "datetime.now", "datetime.utcnow"}
    }
    assert found == set(READS_THE_DATE)


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.cuda.is_available()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_the_check_sees_every_way_to_say_cuda(tmp_path: Path, line: str) -> None:
    for folder in ("workers", "device"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(line)
    assert who_says_cuda(tmp_path) == ["workers/a.py"]


@pytest.mark.parametrize(
    "line",
    [
        "import hybridflow.batch.columns",
        "from hybridflow.batch import columns",
        "def f():\n    from hybridflow.batch.columns import Deferred",
    ],
)
def test_the_check_sees_every_way_past_the_door(tmp_path: Path, line: str) -> None:
    for folder in ("workers", "batch"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(line)
    found = through_the_wall(tmp_path, SUBMODULES, sorted(tmp_path.rglob("*.py")))
    assert found == ["workers/a.py imports hybridflow.batch.columns"]


@pytest.mark.slow
def test_the_door_opens_without_what_files_and_tensors_need() -> None:
    code = (
        "import sys, hybridflow.batch as b; print(sorted({'torch', 'pyarrow', 'ray'} & "
        "set(sys.modules)));print([name for name in b.__all__ if not hasattr(b, name)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split("\n")[:2] == ["[]", "[]"]
