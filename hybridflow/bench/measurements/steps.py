"""Measures complete reinforcement learning steps of the tiny recipe in one process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import loop, repeated
from hybridflow.errors import ResourceError
from hybridflow.observe.jsonl import read_jsonl

RECIPE = "tiny-moe-grpo"
RUNS = 3
_LOOPS = "a hundred plain Python loops"
STEPS = 4  # the first step of a run warms up
_SETTINGS = (
    "cluster=in-process",
    "sft=none",
    "trainer.val_before_train=false",
    "trainer.export=false",
    "trainer.report=false",
    "trainer.dump_rollouts_every_steps=0",
    "trainer.loggers=[jsonl]",
    "trainer.resume=disable",
    "trainer.save_every_steps=0",
    f"trainer.total_steps={STEPS}",
)


@measurement("steps", "full", timeout_s=540)
def steps(place: Place) -> Yields:
    """GRPO steps of the tiny recipe: time per phase, and time until the first step has finished"""
    from hybridflow.config.load import dump_yaml, load_config

    seconds: dict[str, list[float]] = defaultdict(list)
    loops = []
    rate = []
    firsts = []
    starts = []
    for number in range(RUNS):
        starts.append(_loop_seconds())
        found, first = train_recipe(place, f"run{number}")
        firsts.append(first)
        for record in found[1:]:
            loops.append(_loop_seconds())
            for name, value in record.items():
                if name.startswith("timing_s/"):
                    seconds[name.removeprefix("timing_s/")].append(float(value))
            rate.append(tokens_per_second(record))
    yield measured("full/tokens", "tokens/s", rate)
    yardstick = (_LOOPS, loops)
    for name, values in seconds.items():
        if len(values) == len(loops):  # omit phases that some steps do not have
            yield measured(
                f"full/{name}", "s", values, "lower", yardstick=yardstick, bound=0.25
            )
    first_step = "full/start to end of first step"
    yield measured(first_step, "s", firsts, "lower", yardstick=(_LOOPS, starts))
    recipe = dump_yaml(load_config(RECIPE, list(_SETTINGS)))
    yield {"recipe": hashlib.sha256(recipe.encode()).hexdigest()}


def tokens_per_second(record: Mapping[str, Any]) -> float:
    """Return the tokens per second of a step over all its ranks."""
    return float(record["perf/total_num_tokens"]) / float(record["perf/time_per_step"])


def train_recipe(
    place: Place, name: str, words: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], float]:
    """Run the recipe with these settings in addition. Returns the result of `train`."""
    settings = [
        f"--config-name={RECIPE}",
        *_SETTINGS,
        f"output_dir={place.local}",
        f"data.prepare.out={place.folder.resolve() / 'data'}",
        *words,
    ]
    return train(place.local, name, settings)


def train(
    folder: Path,
    name: str,
    words: Sequence[str],
    before: Sequence[str] = (),
    timeout_s: float | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """Run `hybridflow train` in `folder`. Returns the per-step records, and the seconds from the
    start of the command to the end of the first step.

    Args:
        folder: contains the run folder `name`.
        before: words in front of the command, which set its environment.
        timeout_s: limit for the whole run.
    """
    program = [sys.executable, "-P", "-m", "hybridflow.cli.main", "train"]
    command = [*before, *program, *words, f"name={name}"]
    begun = time.time()
    output_of(command, "hybridflow train", folder, timeout_s)
    records = []
    for record in read_jsonl(folder / name / "metrics.jsonl"):
        if record["phase"] == "train":
            records.append(record)
    return records, float(records[0]["wall_time"]) - begun


def output_of(
    command: Sequence[str], what: str, folder: Path, timeout_s: float | None = None
) -> str:
    """Run a command in a folder and return its output.

    Raises:
        ResourceError: the command failed. The message includes the last line of its output.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=timeout_s,
    )
    print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise ResourceError(f"{what} exited with status {done.returncode}: {last}")
    return done.stdout


def _loop_seconds() -> float:
    start = time.perf_counter()
    repeated(loop, 100)()
    return time.perf_counter() - start
