"""The runner of both parts: one closing line, and a failure of either part or of a check fails the
whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import run
from tests.arch.files import ROOT

pytestmark = pytest.mark.slow  # starts pytest again

PASSES = "def test_a():\n    pass\n"
FAILS = "def test_a():\n    assert False\n"
Tree = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Tree:
    """Runs the runner over a tree of two test files: exit status and the lines that it printed."""
    # Nearly all of the time is the start of processes: one of tests is enough for each part, and
    # other plugins of the environment take seconds to load.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(run, "AT_A_TIME", 1)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "CHECKS", ("compileall -q good", "compileall -q bad"))
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for folder in (*run.PARALLEL, *run.WHOLE_RUNS, run.SLURM):
        (tmp_path / folder).mkdir(parents=True)

    def ran(unit: str, dist: str, *words: str) -> tuple[int, list[str]]:
        (tmp_path / "tests/unit/test_u.py").write_text(unit)
        (tmp_path / "tests/dist/test_d.py").write_text(dist)
        status = run.main(["-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", *words])
        return status, capfd.readouterr().out.splitlines()

    return ran


def test_the_closing_line_counts_both_parts(tree: Tree) -> None:
    status, lines = tree(PASSES + PASSES.replace("_a", "_b"), PASSES)
    assert status == 0 and lines[-1].startswith("3 passed in ")


@pytest.mark.parametrize(("unit", "dist"), [(FAILS, PASSES), (PASSES, FAILS)], ids=["unit", "dist"])
def test_a_failure_of_either_part_fails_the_whole(tree: Tree, unit: str, dist: str) -> None:
    status, lines = tree(unit, dist)
    assert status == 1 and lines[-1].startswith("1 failed, 1 passed in ")
    assert (
        lines[-2] == f"FAILED tests/{'unit/test_u' if unit == FAILS else 'dist/test_d'}.py::test_a"
    )


def test_a_failure_is_shown_before_the_next_test_begins(tree: Tree) -> None:
    later = "import os\ndef test_b():\n    os.write(1, b'begun')\n"
    _, lines = tree(PASSES, FAILS + later, "-s", "-n", "0")
    shown = next(
        i for i, line in enumerate(lines) if "test_d.py::test_a failed in its call" in line
    )
    assert shown < next(i for i, line in enumerate(lines) if "begun" in line)


def test_a_file_that_cannot_be_read_and_a_part_that_dies_are_errors(tree: Tree) -> None:
    status, lines = tree("import nothing_of_this_name\n", PASSES)
    assert status and lines[-1].startswith("1 passed, 1 error in ")
    status, lines = tree(PASSES, "import os\nos._exit(0)\n")
    assert status and "1 error in" in lines[-1]


def test_a_selection_may_be_in_one_part_alone_but_not_in_none(tree: Tree) -> None:
    status, lines = tree(PASSES, PASSES.replace("_a", "_other"), "-k", "other")
    assert status == 0 and lines[-1].startswith("1 passed in ")
    assert tree(PASSES, PASSES, "-k", "nowhere")[0] == run.NOTHING_SELECTED


def test_a_check_that_fails_is_an_error_of_the_summary(tree: Tree, tmp_path: Path) -> None:
    assert tree(PASSES, PASSES, "--check")[0] == 0
    (tmp_path / "bad" / "no_python.py").write_text("def\n")
    status, lines = tree(PASSES, PASSES, "--check")
    assert status == 1 and lines[-1].startswith("2 passed, 1 error in ")
    assert "ERROR compileall -q bad" in lines


def test_tests_of_slurm_are_left_out_where_it_is_missing_and_the_last_line_says_so(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / run.SLURM / "test_s.py").write_text(PASSES)
    monkeypatch.setattr(run, "SLURMCTLD", "sh")
    status, lines = tree(PASSES, PASSES)
    assert status == 0 and lines[-1].startswith("3 passed in ") and "left out" not in lines[-1]
    monkeypatch.setattr(run, "SLURMCTLD", "no-such-program")
    status, lines = tree(PASSES, PASSES)
    assert status == 0 and lines[-1].startswith("2 passed in ")
    assert lines[-1].endswith("tests/slurm left out, Slurm is not installed (make setup-slurm)")
