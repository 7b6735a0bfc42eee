"""Seconds that a reward of 0.1 s a row adds to a synchronous step of 512 rows, which scores once all answers are there:
an async function, and functions that hold their process, in as many processes as cores and in 16."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hybridflow.bench.measurements.base import interleaved
from hybridflow.config.schema import RewardConfig
from hybridflow.rewards import RewardManager
from support.report import Figure, median, write

ROUNDS, ROWS, SECONDS = 5, 512, 0.1
ASYNC_CALLS = 64  # of a process
CODE = f"""
import asyncio, time

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep({SECONDS})
    return 1.0

def holds(data_source, solution_str, ground_truth, extra_info):
    time.sleep({SECONDS})
    return 1.0
"""


def main() -> None:
    """All figures."""
    cores = len(os.sched_getaffinity(0))
    ways = {
        f"async function, {cores} processes": ("waits", cores, cores * ASYNC_CALLS),
        f"function, {cores} processes": ("holds", cores, cores),
        "function, 16 processes": ("holds", 16, 16),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder, "reward.py")
        path.write_text(CODE, encoding="utf-8")
        managers = {
            name: stack.enter_context(RewardManager(RewardConfig(path=str(path), name=function, processes=processes)))
            for name, (function, processes, _) in ways.items()
        }

        def score(manager: RewardManager) -> None:
            assert len(manager.score(["a"] * ROWS, ["b"] * ROWS, ["c"] * ROWS)) == ROWS

        sides = {name: lambda manager=manager: score(manager) for name, manager in managers.items()}
        seconds = interleaved(sides, ROUNDS)
    figures = []
    for name, (_, _, at_once) in ways.items():
        least, took = SECONDS * ROWS / at_once, median(seconds[name])
        figures.append(Figure(f"{ROWS} rows of {SECONDS} s, {name}", took, "s", limit=least, share=least / took))
    write("slow_reward", figures, {"rounds": ROUNDS, "statistic": "median", "limit": "calls that are never idle"})


if __name__ == "__main__":
    main()
