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
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from benchmarks.support import lengths_model

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, Reference, single
from hybridflow.bench.rounds import rotated
from hybridflow.bench.run import CONDITIONS
from hybridflow.errors import ConfigError, ResourceError

LIMIT_S = 3600.0  # per round
PROMPTS = 64
SAMPLES = 8
UPDATES = 2
TRL = "TRL"
RECIPE = Path(__file__).parent / "support" / "trl"  # the sides' settings
SIZES = yaml.safe_load((RECIPE / "models.yaml").read_text())
# maximum tokens per response, and the median if lengths vary
LENGTHS: dict[str, tuple[int, float | None]] = {
    "8": (8, None),
    "128": (128, None),
    "varied": (512, 32.0),
}
KINDS = ("", "-reference")
CASES = [
    f"{size}-{length}{kind}" for size in SIZES for length in LENGTHS for kind in KINDS
]
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


@measurement("trl_steps", timeout_s=86_400)
def trl_steps(
    place: Place,
    peer: str = "python-with-trl",
    case: str = "tiny-8",
    sides: str = "TRL,2+2",
    rounds: int = 3,
    steps: int = 3,
) -> Iterator[Metric]:
    """GRPO steps in turn with TRL's; set peer=PYTHON to the Python of an environment with TRL
    1.16"""
    names = sides.split(",")
    unknown = set(names) - {TRL, *LAYOUTS}
    if case not in CASES or unknown:
        raise ConfigError(
            f"case={case} sides={sides}: cases are {', '.join(CASES)}; "
            f"sides are {TRL}, {', '.join(LAYOUTS)}"
        )
    texts = _prepare(place.local, case)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in rotated(names, rounds):
        if name == TRL:
            one = _theirs(place.local, case, texts, peer, steps)
        else:
            one = _ours(place.local, case, LAYOUTS[name], steps)
        found[name].append(one)
        print(f"{case} {name}: {one}", flush=True)
    yield from _metrics(case, found)


def _metrics(case: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[Metric]:
    """Yield the steps and first steps of each layout, together with TRL's from the same rounds."""
    values = {}
    for name, ones in found.items():
        # if a round has a single step of many minutes, that step is counted
        steps = [
            second for one in ones for second in one["seconds"][1:] or one["seconds"]
        ]
        values[name] = {
            "step": steps,
            "start to end of first step": [one["first"] for one in ones],
        }
        length = statistics.mean(one["mean_length"] for one in ones)
        yield single(f"{case} {name}: mean length", "tokens", length)
    theirs = values.pop(TRL, None)
    for name, quantities in values.items():
        for quantity, seconds in quantities.items():
            peer = Reference(TRL, tuple(theirs[quantity])) if theirs else None
            yield Metric(
                "",
                f"{case} {name}: {quantity}",
                "s",
                "lower",
                tuple(seconds),
                peer=peer,
            )


def _prepare(folder: Path, case: str) -> list[str]:
    """Write the model, prompts and reward. Returns the texts of the prompts."""
    size, length, *_ = case.split("-")
    (folder / "model").mkdir()
    lengths_model.write(folder / "model", SIZES[size], LENGTHS[length][1])
    texts = []
    rows = []
    for number, (one, two) in enumerate(
        np.random.default_rng(0).integers(10, 99, (2048, 2))
    ):
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


def _run(side: str, command: Sequence[str], folder: Path, **more: str) -> str:
    """Run one round of a side and return its output. Each side chooses its own number of
    threads."""
    environment = {
        name: value for name, value in os.environ.items() if name not in CONDITIONS
    }
    try:
        done = subprocess.run(
            command,
            env={**environment, "RAY_worker_niceness": "0", **more},
            check=False,
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=LIMIT_S,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"peer={command[0]}: no such Python; nothing was measured"
        ) from None
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{side}: a round did not finish within {LIMIT_S / 60:.0f} minutes; set fewer steps"
        ) from None
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        raise ResourceError(
            f"{side} failed: {done.stderr.strip().rpartition(chr(10))[2]}"
        )
    return done.stdout


def _ours(folder: Path, case: str, layout: Sequence[str], steps: int) -> dict[str, Any]:
    """Run `hybridflow train` and return the duration of its steps and of its start, in seconds."""
    name = f"ours-{time.monotonic_ns()}"
    words = [
        "--config-name=steps",
        f"--config-dir={RECIPE}",
        f"data.max_response_length={LENGTHS[case.split('-')[1]][0]}",
        f"actor.kl_loss_coef={_beta(case)}",
        *layout,
        f"trainer.total_steps={steps}",
        f"name={name}",
    ]
    begun = time.time()
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "train", *words]
    _run("hybridflow train", command, folder)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [
        record for record in map(json.loads, lines) if record["phase"] == "train"
    ]
    return {
        "seconds": [record["timing_s/step"] for record in records],
        "first": records[0]["wall_time"] - begun,
        "mean_length": statistics.mean(
            record["response_length/mean"] for record in records
        ),
    }


def _theirs(
    folder: Path, case: str, texts: Sequence[str], python: str, steps: int
) -> dict[str, Any]:
    """Run `support/trl/side.py` and return the same figures as `_ours`."""
    settings = {
        "model": str(folder / "model"),
        "texts": texts,
        "output": str(folder / "theirs"),
        "steps": steps,
        "most": LENGTHS[case.split("-")[1]][0],
        "beta": _beta(case),
        "prompts": PROMPTS,
        "n": SAMPLES,
        "updates": UPDATES,
        "threads": os.cpu_count(),
    }
    (folder / "peer.json").write_text(json.dumps(settings))
    command = [python, str(RECIPE / "side.py"), str(folder / "peer.json")]
    printed = _run(TRL, command, folder, PYTHONPATH="", HF_HUB_OFFLINE="1")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _beta(case: str) -> float:
    """Return the coefficient of the KL divergence from the reference."""
    return 1e-3 if case.endswith("reference") else 0.0
