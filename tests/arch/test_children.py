"""Every Python that the project starts keeps the working directory out of the front of its import
path, where a file random.py would hide Python's own module."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from tests.arch.files import ROOT, nodes, python_files

SAFE = {"'-P'", "'-I'"}  # the guard of an engine, with -S, has it in its environment


@pytest.mark.slow
def test_no_python_is_started_with_the_working_directory_in_front() -> None:
    seen = 0
    for path in python_files("hybridflow"):
        for node in nodes(path.read_text(encoding="utf-8")):
            words = (
                [ast.unparse(word) for word in node.elts]
                if isinstance(node, ast.List | ast.Tuple)
                else []
            )
            for word, following in itertools.pairwise(words):
                if word == "sys.executable" and following.startswith("'-") and following != "'-S'":
                    seen += 1
                    assert following in SAFE, f"{path}: {', '.join(words)}"
    assert seen > 5


@pytest.mark.slow
def test_no_script_starts_python_with_the_working_directory_in_front() -> None:
    for path in (ROOT / "launch").rglob("*.sh"):
        bare = re.findall(
            r"(?:\$PYTHON|\$\{PYTHON\}|\$1|python3?)\"? -[mc] .*", path.read_text(encoding="utf-8")
        )
        assert not bare, f"{path.name}: {bare}"
