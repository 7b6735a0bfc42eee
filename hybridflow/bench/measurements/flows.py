"""Measures the driver's overhead for running a flow, using workers that compute nothing."""

from __future__ import annotations

import time

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import interleaved
from hybridflow.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)

FLOWS = {"grpo": "grpo", "ppo": "gae"}  # flow -> estimator
STEPS = 20
PROMPTS = 64
SAMPLES = 8  # per prompt
ROUNDS = 7
MOST_MS = 5.0


@measurement("flows", "micro", processes=2)
def flows(place: Place) -> Yields:
    """CPU time that the flow machinery (queue, checks, timeline) adds to a step of 512 samples; the
    workers return immediately"""
    from hybridflow.bench.measurements._null_run import sides

    for name, estimator in FLOWS.items():
        config = RunConfig(
            data=DataConfig(train_batch_size=PROMPTS),
            actor=ActorConfig(kl_loss_coef=0.1),
            algorithm=AlgorithmConfig(adv_estimator=estimator),
            rollout=RolloutConfig(n=SAMPLES),
            trainer=TrainerConfig(total_steps=STEPS, save_every_steps=0),
        )
        seconds = interleaved(
            sides(config, str(place.local / f"{name}.jsonl")),
            rounds=ROUNDS,
            warm_up=2,
            clock=time.process_time,
        )
        added = []
        for flow, hand in zip(seconds["flow"], seconds["hand"], strict=True):
            added.append((flow - hand) / STEPS * 1e3)
        # the difference of two times is noisy: only a change as large as the aim counts
        yield measured(
            f"flows/{name} adds to a step",
            "ms",
            added,
            "lower",
            limit=("aim", MOST_MS),
            bound=1.0,
        )
