"""Answers to mathematical problems: the verifier `math` in the reward pool, against math-verify as its manual uses it,
a row after another in one process."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import itertools
import os
import random

from hybridflow.bench.measurements.base import interleaved
from hybridflow.config.schema import RewardConfig
from hybridflow.rewards import RewardManager
from support.math_pairs import pairs
from support.report import faster, median, write

ROUNDS, PROMPTS, SAMPLES = 7, 24, 8


def batch(seed: int) -> list[tuple[str, str]]:
    """(ground truth, response) of a step: the samples of a prompt have one ground truth, and answers of their own."""
    draw = random.Random(seed)
    rows = []
    for prompt in range(PROMPTS):
        of_prompt = list(pairs(SAMPLES, seed * PROMPTS + prompt))
        truth = draw.choice(of_prompt)[0]
        rows += [(truth, response) for _, response in of_prompt]
    return rows


def main() -> None:
    """All figures."""
    from math_verify import parse, verify

    batches = {"ours": map(batch, itertools.count()), "peer": map(batch, itertools.count())}
    found: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    processes = len(os.sched_getaffinity(0))
    with RewardManager(RewardConfig(processes=processes)) as manager:
        manager.score(["math"] * processes, ["\\boxed{1}"] * processes, ["1"] * processes)  # imports are no part of it

        def ours() -> None:
            rows = next(batches["ours"])
            results = manager.score(["math"] * len(rows), [text for _, text in rows], [truth for truth, _ in rows])
            found["ours"].append([result.score for result in results])

        def theirs() -> None:
            rows = next(batches["peer"])
            found["peer"].append([float(verify(parse(f"${truth}$"), parse(text))) for truth, text in rows])

        seconds = {side: median(times) for side, times in interleaved({"ours": ours, "peer": theirs}, ROUNDS).items()}
    assert found["ours"] == found["peer"]
    what = f"{PROMPTS} prompts x {SAMPLES} answers, {processes} processes"
    figure = faster(what, seconds["ours"], seconds["peer"], "math-verify, a row after another")
    write("math_rewards", [figure], {"rounds": ROUNDS, "statistic": "median"})


if __name__ == "__main__":
    main()
