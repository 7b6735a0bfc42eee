"""A small run folder with something on every page of `hybridflow watch`: curves, alarms, a change
at a resume, tokens of every colour, conversations, long lines, and validation answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Jagged
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tracker import Tracker

STEPS = 40
PROMPTS = ("12+34=", "Is 97 a prime number?", "x" * 200, "Write quicksort.\n\n    def sort(xs):")
NEEDLE = "Kingfisher"  # in one answer to the last prompt of each step of rollouts
DUMPED = (10, 20, 40)
_WORDS = ("plus ", "makes ", "46", "\n", "tool says ", "</pre>", "w" * 60, "und ")
# trainer minus engine: every colour on both sides, and equal log-probs
_DIFFERENCES = (0.0, *(sign * size for size in (2e-3, 2e-2, 0.1, 0.5, 2.0) for sign in (1, -1)))
_LENGTH = 24


def record(run: Path, name: str, quality: float = 0.5) -> Path:
    """Write the run. Of its validation answers, the share `quality` is right."""
    run.mkdir()
    config = {
        "name": name,
        "trainer": {"total_steps": STEPS},
        "data": {"max_response_length": _LENGTH},
        "actor": {"optim": {"lr": quality * 1e-5}},
    }
    (run / "config.yaml").write_text(json.dumps(config, indent=1))
    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _WORDS[0]}})
    )
    change = {"phase": "rl", "step": 20, "changes": ["actor.optim.lr: 1e-05 -> 5e-06"]}
    (run / "changes.jsonl").write_text(json.dumps(change) + "\n")
    with Tracker(run, ("jsonl",)) as tracker:
        for step in range(1, STEPS + 1):
            tracker.log(step, metrics(step, quality))
            if step in DUMPED:
                right = quality * step / STEPS
                tracker.log(step, {"val/score": right, "val/accuracy": right}, "val")
    for step in DUMPED:
        dump_rollouts(dump_path(run / "rollouts", step), samples(step, 4))
        dump_rollouts(dump_path(run / "validation", step), samples(step, 1, quality))
    return run


def metrics(step: int, quality: float = 0.5) -> dict[str, float]:
    """The metrics of a step, which raise alarms at the end."""
    wave = math.sin(step) / 20 * quality
    return {
        "critic/score/mean": quality * step / 50 + wave,
        "critic/advantages/max": 2.0 + wave,
        "critic/advantages/mean": wave,
        "critic/advantages/min": -2.0 + wave,
        "critic/solved_groups": 0.1,
        "critic/unsolved_groups": 0.9,
        "actor/entropy": 2.0 * 0.9**step,
        "actor/ppo_kl": 0.4 if step == STEPS else 0.001 + wave / 100,
        "actor/ref_kl": 0.02 * step,
        "actor/grad_norm": 1.0 + wave,
        "actor/lr": 1e-5,
        "response_length/mean": 20.0 + wave,
        "response_length/max": 24.0,
        "response_length/clip_ratio": 0.5,
        "rollout/logprob_diff/mean": 1e-6 * 1.5**step,
        "rollout/logprob_diff/max": 1e-5 * 1.5**step,
        "rollout/mismatch/ess": 0.4,
        "timing_s/step": 5.0 + wave,
        "timing_s/gen": 3.0 + wave,
        "timing_s/update_actor": 1.5,
        "perf/throughput": 1000.0 + 10 * step,
    }


def samples(step: int, each: int, quality: float = 0.5) -> dict[str, Any]:
    """The rows of a dump with `each` samples of every prompt."""
    count = each * len(PROMPTS)
    rng = np.random.default_rng([step, each])
    ids = np.arange(count * _LENGTH) % len(_WORDS)
    engine = np.full(count * _LENGTH, -1.0, np.float32)
    trainer = engine + np.resize(np.float32(_DIFFERENCES), len(engine))
    talk = [
        {"role": "assistant", "content": "I ask the tool: " + "y" * 120},
        {"role": "tool", "content": '{"result": 46}'},
        {"role": "assistant", "content": "It is 46."},
    ]
    answers = [f"Sample {row} of step {step}: " + "46 " * (10 * row) for row in range(count)]
    if each > 1:
        answers[-1] = f"A long line {'z' * 300} and a {NEEDLE}"
    scores = [float(value) for value in rng.random(count) < quality]
    return {
        "step": [step] * count,
        "uid": [row // each for row in range(count)],
        "data_source": ["arithmetic"] * count,
        "finish_reason": ["length" if row % 3 else "stop" for row in range(count)],
        "prompt_text": [PROMPTS[row // each] for row in range(count)],
        "response_text": answers,
        "ground_truth": ["46"] * count,
        "score": scores,
        "advantage": [score - quality for score in scores],
        "response_length": [_LENGTH] * count,
        "turns": [2] * count,
        "tool_calls": [1] * count,
        "logprob_diff_mean": [1e-6] * count,
        "reward_extra": [json.dumps({"extracted": "46"})] * count,
        "reward_failure": ["the verifier timed out" if row == 1 else None for row in range(count)],
        "messages": [json.dumps(talk) if row % 2 else None for row in range(count)],
        "response_ids": Jagged.from_lengths(ids, [_LENGTH] * count),
        "response_mask": [[[1, 8], [0, 6], [1, _LENGTH - 14]]] * count,
        "response_versions": [[[step - 1, 14], [step, _LENGTH - 14]]] * count,
        "rollout_log_probs": Jagged.from_lengths(engine, [_LENGTH] * count),
        "old_log_probs": Jagged.from_lengths(trainer, [_LENGTH] * count),
    }
