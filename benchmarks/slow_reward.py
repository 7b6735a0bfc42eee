"""Seconds that a reward of 0.1 s a row adds to the generation of 512 rows whose answers end one after the other: an
async function, and functions that hold their process, in as many processes as cores and in 16.

Engines are clocks here: answers have a log-normal number of tokens. The groups, the scorer and the pool of processes
are the ones of a run. Beside it, what the same reward takes once all answers are there.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.bench.measurements.base import interleaved
from hybridflow.config.schema import DataConfig, RewardConfig, RolloutConfig, RunConfig
from hybridflow.rewards import RewardManager
from hybridflow.rollout.evaluation import Scorer
from hybridflow.rollout.groups import Groups
from support.report import Figure, median, write

ROUNDS, PROMPTS, SAMPLES, SECONDS = 5, 64, 8, 0.1
ROWS = PROMPTS * SAMPLES
ASYNC_CALLS = 64  # of a process
MEDIAN_S, P99_S, MOST_S = 2.0, 10.0, 12.0  # of an answer
_POLL_S = 0.02
CODE = f"""
import asyncio, time

def returns(data_source, solution_str, ground_truth, extra_info):
    return 1.0

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep({SECONDS})
    return 1.0

def holds(data_source, solution_str, ground_truth, extra_info):
    time.sleep({SECONDS})
    return 1.0
"""


class Clock:
    """Engines that answer each request after its own time."""

    def __init__(self) -> None:
        sigma = np.log(P99_S / MEDIAN_S) / 2.326348
        drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_S), sigma, ROWS)
        self.seconds = np.minimum(drawn, MOST_S)
        self.begun = 0.0

    def submit(self, prompts: DataProto, *, training: bool, begun: DataProto | None = None) -> list[int]:
        """Begin to answer."""
        self.begun = time.monotonic()
        return list(range(len(prompts)))

    def poll(self) -> None:
        """Wait a moment."""
        time.sleep(_POLL_S)

    def ended(self, tickets: Iterable[int]) -> bool:
        """Whether all of these have been answered."""
        return bool(self.seconds[list(tickets)].max() < time.monotonic() - self.begun)

    def shown(self, tickets: Sequence[int]) -> DataProto:
        """Answers of one token."""
        return DataProto.from_columns({"response_ids": Jagged.from_rows([[1]] * len(tickets), np.int64)})

    take = shown


class Rows:
    """Prompts of one token."""

    def __len__(self) -> int:
        return PROMPTS

    def batch(self, rows: np.ndarray) -> DataProto:
        """The prompts of these rows."""
        texts = np.array(["a"] * len(rows), dtype=object)
        infos = np.array([{} for _ in rows], dtype=object)
        columns = {"data_source": texts, "ground_truth": texts, "extra_info": infos}
        return DataProto.from_columns({"prompt_ids": Jagged.from_rows([[1]] * len(rows), np.int64), **columns})


class Words:
    """A tokenizer of one word."""

    def decode_response(self, ids: Sequence[int]) -> str:
        """The same for every answer."""
        return "word"


def step(manager: RewardManager) -> None:
    """Generate and score."""
    config = RunConfig(data=DataConfig(train_batch_size=PROMPTS), rollout=RolloutConfig(n=SAMPLES))
    words: Any = Words()
    given: Any = (Clock(), Rows(), lambda batch: batch, Scorer(manager, words))
    groups = Groups(config, *given)
    groups.next_batch(0)
    assert len(groups.scores()) == ROWS


def main() -> None:
    """All figures."""
    cores = len(os.sched_getaffinity(0))
    ways = {
        "generation alone": ("returns", cores, ROWS),
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

        sides = {name: lambda manager=manager: step(manager) for name, manager in managers.items()}
        afterwards = {
            f"{name}, once all answers are there": lambda manager=manager: score(manager)
            for name, manager in managers.items()
            if name != "generation alone"
        }
        seconds = interleaved(sides | afterwards, ROUNDS)
    alone = median(seconds["generation alone"])
    figures = [Figure("generation alone", alone, "s")]
    for name, (_, _, at_once) in list(ways.items())[1:]:
        took, least = median(seconds[name]), max(alone, SECONDS * ROWS / at_once)
        later = alone + median(seconds[f"{name}, once all answers are there"])
        figures.append(
            Figure(
                f"generation and {ROWS} rows of {SECONDS} s, {name}", took, "s",
                "scoring once all answers are there", later, later / took, least, least / took,
            )
        )  # fmt: skip
        figures.append(Figure(f"added to the generation, {name}", 100 * (took / alone - 1), "%"))
    write("slow_reward", figures, {"rows": ROWS, "seconds": SECONDS})


if __name__ == "__main__":
    main()
