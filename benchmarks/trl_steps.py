"""Compares GRPO steps with TRL's on the same cores: seconds per step, and seconds to the end of the
first step.

The peer is TRL 1.16 in a separate Python environment:

    python3.11 -m venv FOLDER && FOLDER/bin/pip install trl==1.16.0

A case has 64 prompts x 8 samples and two updates per step in fp32. Both sides start from the same
weights, whose samples have the same length distribution (`support/lengths_model.py`). The sides run
in turn, each round in new processes. The first step of a round is a warm-up and counts only as the
first step, unless it is the only one. Each side chooses its own number of threads.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from benchmarks.support import lengths_model

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.steps import output_of, train
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import rotated
from hybridflow.bench.run import CONDITIONS
from hybridflow.errors import ConfigError, ResourceError

LIMIT_S = 3600.0  # per round
TRL = "TRL"
# each side chooses its own number of threads
ALONE = ["env", *(f"--unset={name}" for name in CONDITIONS), "RAY_worker_niceness=0"]
FOLDER = Path(__file__).parent / "support" / "trl"  # the sides' settings
SIZES = yaml.safe_load((FOLDER / "models.yaml").read_text())
# maximum tokens per response, and the median if lengths vary
LENGTHS = {
    "8": (8, None),
    "128": (128, None),
    "varied": (512, 32.0),
}
KINDS = {"": 0.0, "-reference": 1e-3}  # coefficient of the KL divergence from it
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""
# layouts for two cores: ranks and engines, or everything in the driver's process
LAYOUTS = {
    "in-process": ["cluster=in-process"],
    "1+1": ["cluster.procs_per_node=1", "rollout.num_engines=1"],
    "2+2": ["cluster.procs_per_node=2", "rollout.num_engines=2"],
}


@dataclass(frozen=True)
class Case:
    """Model sizes, maximum and median tokens per response, and the KL coefficient."""

    sizes: dict[str, Any]
    most: int
    median: float | None
    beta: float


CASES = {
    f"{size}-{length}{kind}": Case(SIZES[size], *LENGTHS[length], KINDS[kind])
    for size, length, kind in product(SIZES, LENGTHS, KINDS)
}


@measurement("trl_steps", timeout_s=86_400)
def trl_steps(
    place: Place,
    peer: str = "python-with-trl",
    case: str = "tiny-8",
    sides: str = "TRL,2+2",
    rounds: int = 3,
    steps: int = 3,
) -> Yields:
    """GRPO steps in turn with TRL's; set peer=PYTHON to the Python of an environment with TRL
    1.16"""
    names = sides.split(",")
    if case not in CASES or set(names) - {TRL, *LAYOUTS}:
        raise ConfigError(
            f"case={case} sides={sides}: cases are {', '.join(CASES)}; "
            f"sides are {TRL}, {', '.join(LAYOUTS)}"
        )
    if TRL in names and shutil.which(peer) is None:
        raise ConfigError(f"peer={peer}: no such Python; nothing was measured")
    texts = _prepare(place.local, CASES[case])
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in rotated(names, rounds):
        try:
            if name == TRL:
                one = _theirs(place.local, CASES[case], steps, texts, peer)
            else:
                one = _ours(place.local, CASES[case], steps, LAYOUTS[name])
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"{name}: a round did not finish within {LIMIT_S / 60:.0f} minutes; set fewer steps"
            ) from None
        found[name].append(one)
        print(f"{case} {name}: {one}", flush=True)
    for name, ones in found.items():
        length = statistics.mean(one["mean_length"] for one in ones)
        yield measured(f"{case} {name}: mean length", "tokens", length)
    theirs = _quantities(found.pop(TRL, []))
    for name, ones in found.items():
        for quantity, seconds in _quantities(ones).items():
            peer_seconds = (TRL, theirs[quantity]) if TRL in names else None
            yield measured(
                f"{case} {name}: {quantity}", "s", seconds, "lower", peer=peer_seconds
            )


def _quantities(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the steps and first steps of all rounds of a side, in seconds."""
    steps = []
    for one in rounds:
        # if a round has a single step of many minutes, that step is counted
        steps += one["seconds"][1:] or one["seconds"]
    firsts = [one["first"] for one in rounds]
    return {"step": steps, "start to end of first step": firsts}


def _prepare(folder: Path, case: Case) -> list[str]:
    """Write the model, prompts and reward. Returns the texts of the prompts."""
    (folder / "model").mkdir()
    lengths_model.write(folder / "model", case.sizes, case.median)
    texts = []
    rows = []
    pairs = np.random.default_rng(0).integers(10, 99, (2048, 2))
    for number, (one, two) in enumerate(pairs):
        texts.append(f"{one}+{two}=")
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{one}+{two}"}],
                "reward_model": {"style": "rule", "ground_truth": "0"},
                "extra_info": {"index": number},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return texts


def _ours(
    folder: Path, case: Case, steps: int, layout: Sequence[str]
) -> dict[str, Any]:
    """Run `hybridflow train` and return the duration of its steps and of its start, in seconds."""
    words = [
        "--config-name=steps",
        f"--config-dir={FOLDER}",
        f"data.max_response_length={case.most}",
        f"actor.kl_loss_coef={case.beta}",
        *layout,
        f"trainer.total_steps={steps}",
    ]
    name = f"ours-{time.monotonic_ns()}"
    records, first = train(folder, name, words, ALONE, LIMIT_S)
    lengths = [record["response_length/mean"] for record in records]
    return {
        "seconds": [record["timing_s/step"] for record in records],
        "first": first,
        "mean_length": statistics.mean(lengths),
    }


def _theirs(
    folder: Path, case: Case, steps: int, texts: Sequence[str], python: str
) -> dict[str, Any]:
    """Run `support/trl/side.py` and return the same figures as `_ours`."""
    settings = {"texts": texts, "steps": steps, "most": case.most, "beta": case.beta}
    (folder / "peer.json").write_text(json.dumps(settings))
    offline = ("PYTHONPATH=", "HF_HUB_OFFLINE=1")
    command = [*ALONE, *offline, python, str(FOLDER / "side.py"), "peer.json"]
    printed = output_of(command, TRL, folder, LIMIT_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found
