"""A reader gets from the command line to the loss in a few steps, and sees the loop on one
screen."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
MAX_HOPS = 5
SCREEN = 45


def test_from_the_console_entry_to_the_loss_in_a_few_hops() -> None:
    assert "hybridflow=hybridflow.cli.main:main" in (ROOT / "setup.py").read_text(
        encoding="utf-8"
    ).replace(" ", "")
    graph = grimp.build_graph("hybridflow", cache_dir=None, exclude_type_checking_imports=True)
    chain = graph.find_shortest_chain("hybridflow.cli.main", "hybridflow.algorithms.losses")
    assert chain is not None
    assert len(chain) - 1 <= MAX_HOPS, " -> ".join(chain)


def test_the_loop_fits_on_one_screen_under_its_diagram() -> None:
    tree = ast.parse((ROOT / "hybridflow" / "trainer" / "loop.py").read_text(encoding="utf-8"))
    diagram = ast.get_docstring(tree) or ""
    assert all(word in diagram for word in ("dataset", "engines", "reward", "policy", "sync", "▶"))
    [fit] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "fit"
    ]
    assert (fit.end_lineno or 0) - fit.lineno + 1 <= SCREEN
