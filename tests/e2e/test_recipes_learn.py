"""What the README promises of the recipes at their full length: they learn, a killed demo learns as
much as any other, and a second one starts quickly. Each takes minutes to half an hour, so none is
part of `make test`."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
# the lowest of the seeds of docs/results.md is 0.914; the engines' sampling differs by run
REACHED = 0.88
START_S = 60.0
EARLIER_WARM_START = "sft.steps=135"  # of the runs at several staleness bounds in docs/results.md
SYNCHRONOUS = {1: 0.964, 2: 0.938, 3: 0.898}  # the accuracy at their end by seed, without staleness
# the least held-out score at the end of each, below that of the weakest of the three seeds of
# docs/results.md
ONE_PROCESS = {
    "tiny-rloo": 0.65,
    "tiny-dapo": 0.68,
    "tiny-gspo": 0.66,
    "tiny-reinforce-plus-plus": 0.65,
    "tiny-online-dpo": 0.6,
    "tiny-remax": 0.55,
    "tiny-code-grpo": 0.75,
}
COSTLY = 0.6  # likewise, of tiny-safe-rlhf


def finish(
    folder: Path, command: str, recipe: str, *words: str, timeout_s: float = 2400.0
) -> dict[str, Any]:
    """A whole run in `folder`; its summary."""
    given = [
        "--config-name",
        recipe,
        f"output_dir={folder}",
        f"data.prepare.out={folder / 'data'}",
        *words,
    ]
    with Run(folder / "output", command, *given) as run:
        assert run.end(timeout_s) == 0, run.out + run.err
    name = next((word.removeprefix("name=") for word in words if word.startswith("name=")), recipe)
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return summary


def accuracies(folder: Path) -> list[float]:
    """Held-out scores of a run, in order."""
    records = [
        record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == "val"
    ]
    return [
        next(record[key] for key in ("val/score", "val/accuracy") if key in record)
        for record in records
    ]


# the warm starts of 5 and 11 are the weakest of docs/results.md
@pytest.mark.parametrize("seed", [1, 5, 11])
def test_a_demo_that_was_killed_reaches_the_accuracy_of_one_that_was_not(
    tmp_path: Path, seed: int
) -> None:
    words = [
        "--config-name",
        "tiny-moe-grpo",
        f"seed={seed}",
        f"output_dir={tmp_path}",
        f"data.prepare.out={tmp_path / 'data'}",
    ]
    folder = tmp_path / "tiny-moe-grpo"
    with Run(tmp_path / "output", "train", *words) as run:
        run.wait_for((folder / "rollouts" / "step_000060.parquet").exists, timeout_s=1200.0)
        run.send(signal.SIGKILL)
        run.end(60)
        assert run.left_behind() == []
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(2400) == 0, run.out + run.err
        assert "resuming from" in run.out
    steps = [
        record["step"]
        for record in read_jsonl(folder / "metrics.jsonl")
        if record["phase"] == "train"
    ]
    assert steps == list(range(1, 151))
    assert accuracies(folder)[-1] >= REACHED


@pytest.mark.parametrize("staleness", [1, 4])
def test_samples_of_older_weights_teach_as_much_as_present_ones(
    tmp_path: Path, staleness: int
) -> None:
    found = {}
    for seed in SYNCHRONOUS:
        words = (
            f"seed={seed}",
            f"name=seed-{seed}",
            f"trainer.max_staleness={staleness}",
            "algorithm=grpo-async",
        )
        finish(tmp_path, "train", "tiny-moe-grpo", *words, EARLIER_WARM_START)
        found[seed] = accuracies(tmp_path / f"seed-{seed}")[-1]
    # the standard error of one accuracy is 0.01, and which groups a step trains depends on timing
    assert np.mean([found[seed] - reached for seed, reached in SYNCHRONOUS.items()]) >= -0.02, found


def test_a_second_make_demo_starts_to_train_within_a_minute(tmp_path: Path) -> None:
    """The set-up is there: what is measured is from the command to the first step of training."""
    words = (
        f"output_dir={tmp_path} data.prepare.out={tmp_path / 'data'} trainer.total_steps=1 "
        "sft.steps=1"
    )
    command = ["make", "-C", str(ROOT), "--no-print-directory", "demo", f"ARGS={words}"]
    with Run(tmp_path / "output", command=command) as run:
        started = time.monotonic()
        run.wait_for(lambda: re.search(r"^(SFT|GRPO) 1/", run.out, re.MULTILINE), timeout_s=300.0)
        seconds = time.monotonic() - started
        assert run.end(300) == 0, run.out + run.err
    assert seconds <= START_S


def test_ppo_with_a_reward_model_learns(tmp_path: Path) -> None:
    finish(tmp_path, "train-reward", "tiny-moe-reward")
    model = tmp_path / "tiny-moe-reward" / "export"
    finish(tmp_path, "train", "tiny-moe-ppo", f"reward_model.path={model}")
    reached = accuracies(tmp_path / "tiny-moe-ppo")
    assert reached[-1] >= 0.8 and reached[-1] > reached[0] + 0.3, reached


def test_grpo_on_fsdp_learns(tmp_path: Path) -> None:
    finish(tmp_path, "train", "tiny-dense-grpo-fsdp")
    reached = accuracies(tmp_path / "tiny-dense-grpo-fsdp")
    assert reached[-1] >= 0.95 and reached[-1] > reached[0] + 0.2, reached


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("recipe", ONE_PROCESS)
def test_a_recipe_for_one_process_learns(tmp_path: Path, recipe: str, seed: int) -> None:
    finish(tmp_path, "train", recipe, f"seed={seed}")
    reached = accuracies(tmp_path / recipe)
    assert reached[-1] >= ONE_PROCESS[recipe], reached
    # of what was wrong after the warm start
    assert 1 - reached[-1] <= 0.75 * (1 - reached[0]), reached


def test_safe_rlhf_keeps_the_cost_near_its_limit_and_learns(tmp_path: Path) -> None:
    finish(tmp_path, "train", "tiny-safe-rlhf")
    steps = [
        record
        for record in read_jsonl(tmp_path / "tiny-safe-rlhf" / "metrics.jsonl")
        if record["phase"] == "train"
    ]
    costs = [record["flow/cost"] for record in steps]
    multipliers = [record["flow/multiplier"] for record in steps]
    # a fifth of the right sums have the digit; the limit is 0.1
    assert 0.05 <= np.mean(costs[50:]) <= 0.15, costs
    assert max(multipliers) >= 1.5 * min(multipliers), multipliers
    reached = accuracies(tmp_path / "tiny-safe-rlhf")
    assert reached[-1] >= max(reached[0], COSTLY), reached


def test_a_policy_learns_beside_its_reward_model(tmp_path: Path) -> None:
    finish(tmp_path, "sft", "tiny-learned-reward-start")
    start = tmp_path / "tiny-learned-reward-start" / "export"
    words = (f"model.path={start}", f"reward_model.path={start}")
    finish(tmp_path, "train", "tiny-learned-reward", *words)
    reached = accuracies(tmp_path / "tiny-learned-reward")
    assert 1 - reached[-1] <= 0.5 * (1 - reached[0]), reached


def test_replay_of_the_engines_experts_does_not_raise_the_difference_of_log_probs(
    tmp_path: Path,
) -> None:
    """In bfloat16, where engines and trainer round differently and routers choose differently now
    and then."""
    found = {}
    for replay in ("none", "r3"):
        words = (
            f"actor.router_replay={replay}",
            f"name={replay}",
            "model.dtype=bfloat16",
            "trainer.total_steps=4",
        )
        one = (
            "actor=tiny",
            "cluster=one-process",
            "rollout=tiny",
            "rollout.logprob_diff_bound=null",
        )
        finish(tmp_path, "train", "tiny-moe-grpo", *words, *one)
        records = [
            r for r in read_jsonl(tmp_path / replay / "metrics.jsonl") if r["phase"] == "train"
        ]
        found[replay] = np.mean([record["rollout/logprob_diff/mean"] for record in records])
    assert 0 < found["r3"] <= found["none"], found
