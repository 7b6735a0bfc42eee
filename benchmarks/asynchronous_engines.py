"""Seconds of a step of synchronous and asynchronous runs over real engines, on the same cores, in interleaved rounds.

`make bench NAME=asynchronous_engines ARGS="--rounds 3 --steps 8"`. Two ranks and two SGLang engines train the tiny
model of `trl_steps` on 64 prompts x 8 samples, two updates a step, whose responses have lengths that vary (median 32,
99th percentile about 300, cut at 512). Each run has processes of its own; its first step warms up and is not counted.
Engines and ranks share all cores, so what an asynchronous run can gain here is the time in which a core has nothing to
do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trl_steps import PROMPTS, N, prepare, train

from support.report import Figure, faster, median, write

NAME, CASE, LAYOUT = "asynchronous_engines", "tiny-varied", "2+2"
CORRECTED = "algorithm=grpo-async"
METRICS = {"seconds": "timing_s/step", "waits": "timing_s/gen", "age": "rollout/staleness/mean"}
SIDES: dict[str, Sequence[str]] = {
    "max_staleness 0": (),
    "max_staleness 1": ("trainer.max_staleness=1", CORRECTED),
    "max_staleness 4": ("trainer.max_staleness=4", CORRECTED),
}


def main() -> None:
    """Run all sides in turns, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a run; the first is not counted")
    given = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, CASE)
        for turn in range(given.rounds):
            sides = list(SIDES)
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                records, _ = train(folder, CASE, LAYOUT, given.steps, SIDES[side])
                for quantity, metric in METRICS.items():
                    values = [record.get(metric, 0.0) for record in records[1:]]
                    found[side].setdefault(quantity, []).extend(values)
                shown = ", ".join(f"{record['timing_s/step']:.2f}" for record in records)
                print(f"{side}: {shown} s", flush=True)
    synchronous = median(found["max_staleness 0"]["seconds"])
    figures = []
    for side, one in found.items():
        step = median(one["seconds"])
        figures += [
            faster(f"{side}: a step ({len(one['seconds'])} steps)", step, synchronous, "synchronous"),
            Figure(f"{side}: waits for answers", median(one["waits"]), "s"),
            Figure(f"{side}: age of prompts", sum(one["age"]) / len(one["age"]), "weight versions"),
        ]
    write(NAME, figures, {"OMP_NUM_THREADS": "as placement sets it", "prompts": PROMPTS, "n": N, "layout": LAYOUT})


if __name__ == "__main__":
    main()
