"""Steps of GRPO beside TRL's on the same cores: seconds a step, and from the start to the end of the first step.

`make bench NAME=trl_steps ARGS="--peer /path/to/python --case tiny-8"`. The peer is a Python with TRL 1.16, in an
environment of its own:

    python3.11 -m venv FOLDER && FOLDER/bin/pip install trl==1.16.0

Every case is 64 prompts x 8 samples and two updates a step in fp32 from the same weights, whose samples have the same
lengths in distribution (`support/lengths_model.py`). The sides run in turns, each round in processes of its own; the
first step of a round warms up and is only counted as the first, unless it is the only one. Neither side is told a
number of threads from outside. Rounds of several calls are gathered in `results/trl_steps.samples.json`, and the
figures are the medians of those that were taken at the present commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.observe.environment import describe_environment
from support import lengths_model
from support.report import RESULTS, Figure, faster, write

LIMIT_S = 3600.0  # of a round
NAME, PROMPTS, N, UPDATES = "trl_steps", 64, 8, 2
SAMPLES = RESULTS / f"{NAME}.samples.json"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "intermediate_size": 512},
    "wide": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 64, "intermediate_size": 1536},
}  # fmt: skip
LENGTHS: dict[str, tuple[int, float | None]] = {"8": (8, None), "128": (128, None), "varied": (512, 32.0)}
CASES = [f"{size}-{length}{kind}" for size in SIZES for length in LENGTHS for kind in ("", "-reference")]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""
# Layouts of two cores: ranks and engines, or everything in the driver's process.
LAYOUTS = {
    "in-process": ["cluster=in-process"],
    "1+1": ["cluster=one-process", "cluster.procs_per_node=1", "rollout.num_engines=1"],
    "2+2": ["cluster=one-process", "cluster.procs_per_node=2", "rollout.num_engines=2"],
}


def prepare(folder: Path, case: str) -> list[str]:
    """Model, prompts and reward; returns the prompts."""
    size, length, *_ = case.split("-")
    (folder / "model").mkdir()
    lengths_model.write(folder / "model", SIZES[size], LENGTHS[length][1])
    numbers = np.random.default_rng(0).integers(10, 99, (2048, 2)).tolist()
    texts = [f"{one}+{two}" for one, two in numbers]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number},
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return [f"{text}=" for text in texts]


def inherited() -> dict[str, str]:
    """The environment of both sides: each takes the threads that it takes for a user who says nothing."""
    told = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # by `support.conditions`
    return {name: value for name, value in os.environ.items() if name not in told}


def run(side: str, command: list[str], environment: dict[str, str], folder: Path) -> str:
    """What one round of a side printed; SystemExit says why it has no figures."""
    try:
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, cwd=folder, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{side}: a round had not ended after {LIMIT_S / 60:.0f} minutes; take fewer steps") from None
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def train(
    folder: Path, case: str, layout: str, steps: int, more: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], float]:
    """One run of `hybridflow train`; `more` are overrides. Returns the metrics of its steps, and the seconds from the
    start to the end of the first."""
    most = LENGTHS[case.split("-")[1]][0]
    words = [
        "--config-name", "tiny-moe-grpo", "model=folder", f"model.path={folder / 'model'}", "model.dtype=float32",
        "data=files", f"data.train_files=[{folder / 'train.parquet'}]", f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8", f"data.max_response_length={most}", "reward=custom",
        f"reward.path={folder / 'reward.py'}", "sft=none", "actor=tiny", f"rollout.n={N}",
        f"actor.ppo_mini_batch_size={PROMPTS // UPDATES}", "actor.optim.lr=1e-6", "actor.optim.lr_warmup_steps=0",
        "actor.optim.lr_decay_style=constant", "actor.optim.min_lr=0", "actor.max_tokens_per_micro_batch=8192",
        f"actor.kl_loss_coef={1e-3 if case.endswith('reference') else 0}",
        *LAYOUTS[layout],
        "rollout.max_running_requests=512", "rollout.max_total_tokens=81920", f"trainer.total_steps={steps}",
        "trainer.val_before_train=false", "trainer.export=false", "trainer.report=false",
        "trainer.dump_rollouts_every_steps=0", "trainer.loggers=[jsonl]", f"output_dir={folder}", "name=ours",
        "trainer.resume=disable", *more,
    ]  # fmt: skip
    environment = {**inherited(), "RAY_worker_niceness": "0"}
    begun = time.time()
    command = [str(Path(sys.executable).with_name("hybridflow")), "train", *words]
    run("hybridflow train", command, environment, folder)
    records = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["phase"] == "train"]
    shutil.rmtree(folder / "ours")
    return records, records[0]["wall_time"] - begun


def ours(folder: Path, case: str, layout: str, steps: int) -> dict[str, Any]:
    """What one run of `hybridflow train` took."""
    records, first = train(folder, case, layout, steps)
    return {
        "seconds": [record["timing_s/step"] for record in records],
        "first": first,
        "mean_length": statistics.mean(record["response_length/mean"] for record in records),
    }


def theirs(folder: Path, case: str, texts: list[str], python: Path, steps: int) -> dict[str, Any]:
    """One run of TRL."""
    settings = {
        "model": str(folder / "model"), "texts": texts, "output": str(folder / "theirs"), "steps": steps,
        "most": LENGTHS[case.split("-")[1]][0], "beta": 1e-3 if case.endswith("reference") else 0.0,
        "prompts": PROMPTS, "n": N, "updates": UPDATES, "threads": os.cpu_count(),
    }  # fmt: skip
    found = peer_run(folder, settings, python)
    lengths, _ = found.pop("lengths"), found.pop("curve")
    return {**found, "mean_length": statistics.mean(lengths), "percentiles": np.percentile(lengths, [50, 99]).tolist()}


def peer_run(folder: Path, settings: dict[str, Any], python: Path) -> dict[str, Any]:
    """What `support/trl_side.py` found with these settings."""
    file = folder / "peer.json"
    file.write_text(json.dumps(settings))
    script = Path(__file__).parent / "support" / "trl_side.py"
    environment = {name: value for name, value in inherited().items() if name != "PYTHONPATH"}
    printed = run("TRL", [str(python), str(script), str(file)], environment | {"HF_HUB_OFFLINE": "1"}, folder)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def gather(case: str, side: str, found: dict[str, Any]) -> None:
    """Add a round to the samples of earlier ones."""
    samples = json.loads(SAMPLES.read_text()) if SAMPLES.exists() else {}
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
    samples.setdefault(case, {}).setdefault(side, []).append({**stamp, **found})
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n")


def commit() -> str:
    """The commit of the tree, or nothing where there is none."""
    return str((describe_environment().get("git") or {}).get("commit", ""))


def figures() -> list[Figure]:
    """Our best layout against TRL in each case that both sides have run at this commit."""
    found, present = [], commit()
    for case, gathered in json.loads(SAMPLES.read_text()).items():
        sides = {side: kept for side, rounds in gathered.items() if (kept := taken_at(present, rounds))}
        steps = {side: [s for one in rounds for s in counted(one["seconds"])] for side, rounds in sides.items()}
        first = {side: statistics.median(one["first"] for one in rounds) for side, rounds in sides.items()}
        own = [side for side in sides if side != "trl"]
        if not own or "trl" not in sides:
            continue
        middle = {side: statistics.median(values) for side, values in steps.items()}
        best = min(own, key=lambda side: middle[side])
        count = f"{best}, {len(steps[best])} and {len(steps['trl'])} steps"
        found.append(faster(f"{case} step ({count})", middle[best], middle["trl"], "TRL"))
        found.append(faster(f"{case} start to end of first step ({best})", first[best], first["trl"], "TRL"))
    return found


def counted(seconds: Sequence[float]) -> Sequence[float]:
    """The steps of a round without the first, which warms up; a single one, of many minutes, is counted."""
    return seconds[1:] or seconds


def taken_at(commit: str, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rounds that were run at a commit."""
    return [one for one in rounds if one.get("commit") == commit]


def has_trl(python: Path) -> str | None:
    """The version of TRL there; None without one."""
    if shutil.which(python) is None:
        return None
    script = "from importlib.metadata import version; print(version('trl'))"
    done = subprocess.run([str(python), "-c", script], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Run the cases that were asked for, and write the figures of all rounds so far."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--peer", type=Path, default=Path(os.environ.get("HYBRIDFLOW_TRL_PYTHON", "python-with-trl")))
    parser.add_argument("--case", action="append", choices=CASES, help="may be given again; default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of a round; of several the first is not counted")
    parser.add_argument("--side", action="append", choices=["trl", *LAYOUTS], help="default: trl and 2+2")
    given = parser.parse_args()
    sides = given.side or ["trl", "2+2"]
    version = has_trl(given.peer)
    if "trl" in sides and version is None:
        print(f"no figure was taken: {given.peer} is no Python with TRL 1.16; give one with --peer")
        return
    for case in given.case or CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            texts = prepare(folder, case)
            for turn in range(given.rounds):
                for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                    if side == "trl":
                        found = theirs(folder, case, texts, given.peer, given.steps)
                    else:
                        found = ours(folder, case, side, given.steps)
                    gather(case, side, {**found, "load": round(os.getloadavg()[0], 1)})
                    shown = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
                    print(f"{case} {side}: {shown} s, first after {found['first']:.1f} s, "
                          f"{found['mean_length']:.1f} tokens", flush=True)  # fmt: skip
    write(NAME, figures(), {"OMP_NUM_THREADS": "as each side sets it", "trl": version, "prompts": PROMPTS, "n": N})


if __name__ == "__main__":
    main()
