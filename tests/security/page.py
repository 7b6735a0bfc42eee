"""The table of edges in docs/security.md: `python -m tests.security.page [RUN...]` starts a run in
each way (or in the named ones), takes its inventory, and writes the rows."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hybridflow.process.secret import VARIABLE
from tests.security import launchers
from tests.security.inventory import Inventory, rows, take
from tests.slurm.cluster import SlurmCluster

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
HEAD = (
    "| What | Process | Where | Mode | What another user gets | In |\n|---|---|---|---|---|---|\n"
)
END = "\n\n"
Row = tuple[str, ...]


@contextmanager
def _local() -> Iterator[launchers.Live]:
    with launchers.shared_folder() as shared, launchers.local(shared) as live:
        yield live


@contextmanager
def _joined() -> Iterator[launchers.Live]:
    with launchers.shared_folder() as shared, launchers.joined(shared) as live:
        yield live


@contextmanager
def _slurm() -> Iterator[launchers.Live]:
    with (
        launchers.shared_folder() as shared,
        SlurmCluster(["n1", "n2"]) as cluster,
        launchers.slurm_job(shared, cluster) as live,
    ):
        yield live


RUNS: dict[str, Callable[[], AbstractContextManager[launchers.Live]]] = {
    "local": _local,
    "joined": _joined,
    "slurm": _slurm,
}


def described(run: str) -> list[Row]:
    """The rows of the page that are about this way to start a run."""
    return [row for row, runs in _read().items() if run in runs]


def _read() -> dict[Row, set[str]]:
    text = PAGE.read_text(encoding="utf-8")
    lines = text.partition(HEAD)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row): set(runs.split(", ")) for *row, runs in cells}


def write(found: dict[str, list[Row]]) -> None:
    """Put the rows of these runs in place of those that the page had of them."""
    table = {row: runs - found.keys() for row, runs in _read().items()}
    for run, made in found.items():
        for row in made:
            table.setdefault(row, set()).add(run)
    lines = [
        f"| {' | '.join(row)} | {', '.join(sorted(runs))} |"
        for row, runs in sorted(table.items())
        if runs
    ]
    before, head, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    PAGE.write_text(
        before + head + "\n".join(lines) + END + after.partition(END)[2], encoding="utf-8"
    )


def show(run: str, taken: Inventory) -> None:
    """Print the rows as the page has them, and what is wrong."""
    print(
        "\n".join(f"| {' | '.join(row)} | {run} |" for row in rows(taken.edges)),
        *taken.faults,
        sep="\n",
        flush=True,
    )


def main(names: list[str]) -> None:
    """Start the runs and write their rows."""
    os.environ.setdefault(VARIABLE, secrets.token_hex(32))  # as tests/conftest.py does
    for name in names or list(RUNS):
        with RUNS[name]() as live:
            taken = take(live.processes(), live.run_folders)
        show(name, taken)
        write({name: rows(taken.edges)})


if __name__ == "__main__":
    main(sys.argv[1:])
