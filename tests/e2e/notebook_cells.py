"""Execute notebooks as Jupyter does: in one thread whose event loop is running. `python -m
tests.e2e.notebook_cells NOTEBOOK|PROGRAM ...`."""

from __future__ import annotations

import ast
import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any


async def execute(path: Path) -> None:
    """Run the code cells of a notebook one after another."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        place = f"{path.name}, cell {number}"
        tree = ast.parse("".join(cell["source"]), place)
        shown = tree.body.pop().value if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, place, "exec"), names)
        if shown is not None:
            print(f"{place}: {eval(compile(ast.Expression(shown), place, 'eval'), names)!r:.300}")


async def main() -> None:
    """Execute the notebooks and programs that the command line names."""
    for path in sys.argv[1:]:
        if path.endswith(".ipynb"):
            await execute(Path(path))
        else:
            runpy.run_path(path)["main"]()


if __name__ == "__main__":
    asyncio.run(main())
