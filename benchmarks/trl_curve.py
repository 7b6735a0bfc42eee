"""Learning beside TRL's: held-out accuracy of the same model on the same task, step by step.

`make bench NAME=trl_curve ARGS="--peer /path/to/python --seed 1 --seed 2"`; the peer is that of `trl_steps.py`. Both
sides start from one folder, the export of a short supervised training, and train with GRPO on the same prompts with the
same rewards and optimizer: 64 prompts x 8 samples, one update a step, the mean over tokens, a rate that falls to zero.
Data order and samples differ, so what is compared is the curves within the spread of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoTokenizer
from trl_steps import LAYOUTS, has_trl, inherited, peer_run, run

from support.report import Figure, write

RECIPE, STEPS, EVERY, LR, WARMUP, MOST = "tiny-rloo", 75, 25, 3e-4, 5, 8
HYBRIDFLOW = str(Path(sys.executable).with_name("hybridflow"))


def start_from(folder: Path) -> Path:
    """A folder with a model that gets some sums right; both sides start from it."""
    words = ["--config-name", RECIPE, f"output_dir={folder}", f"data.prepare.out={folder / 'data'}", "name=warm"]
    words.append("sft=warm-start")
    run("hybridflow sft", [HYBRIDFLOW, "sft", *words], inherited(), folder)
    return folder / "warm" / "export"


def ours(folder: Path, model: Path, seed: int, layout: str) -> dict[int, float]:
    """Held-out accuracy by step of `hybridflow train`."""
    name = f"ours-{seed}"
    words = [
        "--config-name", RECIPE, "algorithm=grpo", "model=folder", f"model.path={model}", "sft=none", f"seed={seed}",
        "model.dtype=float32", f"trainer.total_steps={STEPS}", f"trainer.test_every_steps={EVERY}",
        f"actor.optim.lr={LR}", "actor.optim.min_lr=0", f"actor.optim.lr_decay_steps={STEPS}",
        f"actor.optim.lr_warmup_steps={WARMUP}", f"data.max_response_length={MOST}", *LAYOUTS[layout],
        f"data.prepare.out={folder / 'data'}", f"output_dir={folder}", f"name={name}", "trainer.report=false",
        "trainer.export=false", "trainer.loggers=[jsonl]", "trainer.resume=disable",
    ]  # fmt: skip
    run("hybridflow train", [HYBRIDFLOW, "train", *words], inherited(), folder)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["val/score"] for record in records if record["phase"] == "val"}


def theirs(folder: Path, model: Path, seed: int, python: Path) -> dict[int, float]:
    """The same of TRL."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rows(name: str) -> list[tuple[str, str]]:
        given = pq.read_table(folder / "data" / f"{name}.parquet", columns=["prompt", "reward_model"]).to_pylist()
        return [
            (
                str(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)),
                row["reward_model"]["ground_truth"],
            )
            for row in given
        ]

    texts, truths = zip(*rows("train"), strict=True)
    learning = {"truths": truths, "held_out": rows("test"), "every": EVERY, "lr": LR, "warmup": WARMUP}
    settings = {
        "model": str(model), "texts": texts, "output": str(folder / f"theirs-{seed}"), "steps": STEPS, "most": MOST,
        "beta": 1e-3, "prompts": 64, "n": 8, "updates": 1, "threads": os.cpu_count(), "seed": seed,
        "learning": learning,
    }  # fmt: skip
    found = peer_run(folder, settings, python)
    return {int(step): value for step, value in found["curve"].items()}


def main() -> None:
    """Both curves of each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--peer", type=Path, default=Path(os.environ.get("HYBRIDFLOW_TRL_PYTHON", "python-with-trl")))
    parser.add_argument("--seed", type=int, action="append", help="may be given again; default: 1, 2 and 3")
    parser.add_argument("--layout", choices=LAYOUTS, default="in-process")
    given = parser.parse_args()
    version = has_trl(given.peer)
    if version is None:
        print(f"no figure was taken: {given.peer} is no Python with TRL 1.16; give one with --peer")
        return
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = start_from(folder)
        for seed in given.seed or (1, 2, 3):
            own, peer = ours(folder, model, seed, given.layout), theirs(folder, model, seed, given.peer)
            print(f"seed {seed}: ours {own}, TRL {peer}", flush=True)
            for step in sorted(own.keys() & peer.keys()):
                text = f"held-out accuracy, seed {seed}, after {step} steps"
                figures.append(Figure(text, own[step], "share", "TRL", peer[step]))
    write("trl_curve", figures, {"trl": version, "layout": given.layout, "steps": STEPS})


if __name__ == "__main__":
    main()
