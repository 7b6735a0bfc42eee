"""The files of the project: those that git ignores (downloaded peers, results, caches) are not its
own."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def repository_files() -> list[Path]:
    """What git tracks or would track; without git, everything outside hidden and build folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [
            ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()
        ]
    skipped = {".venv", ".git", "build", "dist", "runs", "data", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)
    ]


def python_files(*folders: str) -> list[Path]:
    """Python files below folders of the project, sorted."""
    roots = [ROOT / folder for folder in folders]
    return sorted(
        path
        for path in repository_files()
        if path.suffix == ".py" and any(path.is_relative_to(root) for root in roots)
    )


@functools.cache
def parse(source: str) -> ast.Module:
    """The syntax tree of a file's text. It is parsed once for all tests of a process, which must
    leave it unchanged."""
    # it would look for garbage among the nodes of all files, which takes longer than parsing
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of that tree, in the order of `ast.walk`, which takes longer than the parser."""
    return tuple(ast.walk(parse(source)))
