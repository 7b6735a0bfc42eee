"""Whole steps of reinforcement learning with the tiny recipe, in one process, and TRL's where it is installed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.bench import result as results
from hybridflow.bench.measurements.base import Place, loop, measurement
from hybridflow.bench.result import Metric, NotRun, Reference
from hybridflow.errors import ResourceError

RECIPE, RUNS, STEPS = "tiny-moe-grpo", 3, 4  # the first step of a run warms up
TRL = "HYBRIDFLOW_TRL_PYTHON"
_SETTINGS = (
    *("cluster=in-process", "sft=none", "trainer.val_before_train=false", "trainer.export=false"),
    *("trainer.report=false", "trainer.dump_rollouts_every_steps=0", "trainer.loggers=[jsonl]"),
    *("trainer.resume=disable", "trainer.save_every_steps=0", f"trainer.total_steps={STEPS}"),
)


@measurement("steps", "full", timeout_s=540)
def steps(place: Place) -> Iterator[Metric | NotRun | dict[str, str]]:
    """steps of GRPO with the tiny recipe by phase, and to the first step; TRL's beside them where it is installed"""
    seconds: dict[str, list[float]] = defaultdict(list)
    loops, firsts, starts = [], [], []
    for number in range(RUNS):
        starts.append(_loop_seconds())
        found, first = train(place, [f"name=run{number}"])
        firsts.append(first)
        for record in found[1:]:
            loops.append(_loop_seconds())
            for name, value in record.items():
                if name.startswith("timing_s/") or name == "perf/throughput":
                    seconds[name].append(float(value))
    yardstick = Reference("a hundred of Python's own loops", tuple(loops))
    for name, values in seconds.items():
        if len(values) != len(loops):
            continue  # a phase that some steps do not have
        if name == "perf/throughput":
            yield Metric("steps", "full/tokens", "tokens/s", "none", tuple(values))
        else:
            label = f"full/{name.removeprefix('timing_s/')}"
            yield Metric("steps", label, "s", "lower", tuple(values), yardstick=yardstick, bound=0.25)
    yardstick = Reference("a hundred of Python's own loops", tuple(starts))
    yield Metric("steps", "full/start to end of first step", "s", "lower", tuple(firsts), yardstick=yardstick)
    yield {"recipe": _recipe_hash()}
    yield from _trl(place)


def train(place: Place, words: list[str]) -> tuple[list[dict[str, Any]], float]:
    """The records of the steps of one run, and the seconds from the command to the end of the first step.

    Raises:
        ResourceError: the run failed; says what it said last.
    """
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "train", "--config-name", RECIPE, *_SETTINGS]
    command += [f"output_dir={place.local}", f"data.prepare.out={place.folder.resolve() / 'data'}", *words]
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place.local)
    print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ResourceError(f"hybridflow train ended with status {done.returncode}: {said[-1] if said else ''}")
    name = next(word.removeprefix("name=") for word in words if word.startswith("name="))
    lines = (place.local / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if (record := json.loads(line))["phase"] == "train"]
    return records, float(records[0]["wall_time"]) - begun


def _loop_seconds() -> float:
    start = time.perf_counter()
    for _ in range(100):
        loop()
    return time.perf_counter() - start


def _recipe_hash() -> str:
    from hybridflow.config.load import dump_yaml, load_config

    return hashlib.sha256(dump_yaml(load_config(RECIPE, list(_SETTINGS))).encode()).hexdigest()


def _trl(place: Place) -> Iterator[Metric | NotRun]:
    """The script that has both sides in turns, at the same model, prompts, samples, lengths and updates."""
    from hybridflow.bench.run import RESULT_VARIABLE, scripts

    python = os.environ.get(TRL)
    if python is None or "trl_steps" not in scripts():
        why = f"TRL is not installed: ${TRL} names no Python that has it (docs/benchmarking.md)"
        yield NotRun("steps beside TRL's", why)
        return
    out = place.local / "trl.json"
    words = [sys.executable, str(scripts()["trl_steps"]), "--case", "tiny-8", "--rounds", "3", "--steps", "3"]
    done = subprocess.run(
        [*words, "--peer", python], env={**os.environ, RESULT_VARIABLE: str(out)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
    if not Path(out).exists():
        said = (done.stdout + done.stderr).strip().splitlines()
        yield NotRun("steps beside TRL's", said[-1] if said else f"the script ended with status {done.returncode}")
        return
    yield from results.read(out).metrics
