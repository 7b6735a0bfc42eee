"""Whole runs in one process, and the numbers that they have computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

# of the time and the machine, not of what is computed
_CLOCKS = ("timing_", "perf/", "sync/seconds", "controller/", "engine/", "wall_time")


def train(
    output: Path, words: Sequence[str], name: str, run_of: type[Run] = ForkedRun
) -> tuple[str, Path]:
    """One run with its output and its folder. `run_of=Run` starts an interpreter for it."""
    given = ("train", *words, f"name={name}", f"output_dir={output}")
    with run_of(output / f"output-{name}", *given) as run:
        exit_code = run.end(120)
        assert exit_code == 0, run.out + run.err
        # it is one process, but for git, which is asked for the commit; a helper that it starts has
        # its command line until the helper's program runs, and none, but the name of its parent's
        # program, once it has ended
        programs = {
            name for name in run.seen.values() if not name.startswith("git ") and name != "python"
        }
        assert run.left_behind() == [] and len(programs) == 1
        return run.out, output / name


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What was computed in each step."""
    records = [
        record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == "train"
    ]
    return [
        {name: value for name, value in one.items() if not name.startswith(_CLOCKS)}
        for one in records
    ]
