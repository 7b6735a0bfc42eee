"""Measures the driver's overhead for running a flow, using workers that compute nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, measured
from hybridflow.bench.rounds import Call, interleaved
from hybridflow.config.schema import RunConfig

if TYPE_CHECKING:
    from hybridflow.batch import DataProto

FLOWS = {"grpo": "grpo", "ppo": "gae"}  # flow -> estimator
STEPS = 20
PROMPTS = 64
SAMPLES = 8  # per prompt
# per response; few, so that advantages, which both sides compute, take negligible time
TOKENS = 8
ROUNDS = 7
MOST_MS = 5.0


@measurement("flows", "micro", processes=2)
def flows(place: Place) -> Iterator[Metric]:
    """CPU time that the flow machinery (queue, checks, timeline) adds to a step of 512 samples; the
    workers return immediately"""
    for name, estimator in FLOWS.items():
        sides = _sides(_Workers(_config(estimator)), str(place.local / f"{name}.jsonl"))
        seconds = interleaved(sides, rounds=ROUNDS, warm_up=2, clock=time.process_time)
        pairs = zip(seconds["flow"], seconds["hand"], strict=True)
        added = [(flow - hand) / STEPS * 1e3 for flow, hand in pairs]
        # the difference of two times is noisy: only a change as large as the aim counts
        yield measured(
            f"flows/{name} adds to a step",
            "ms",
            added,
            "lower",
            limit=("aim", MOST_MS),
            bound=1.0,
        )


def _sides(workers: _Workers, timeline: str) -> dict[str, Call]:
    from hybridflow.single_controller import block_on

    return {
        "flow": lambda: block_on(_followed(workers, timeline)),
        "hand": lambda: block_on(_by_hand(workers)),
    }


def _config(estimator: str) -> RunConfig:
    from hybridflow.config.schema import (
        ActorConfig,
        AlgorithmConfig,
        DataConfig,
        RolloutConfig,
        TrainerConfig,
    )

    return RunConfig(
        data=DataConfig(train_batch_size=PROMPTS),
        actor=ActorConfig(kl_loss_coef=0.1),
        algorithm=AlgorithmConfig(adv_estimator=estimator),
        rollout=RolloutConfig(n=SAMPLES),
        trainer=TrainerConfig(total_steps=STEPS, save_every_steps=0),
    )


async def _followed(workers: _Workers, timeline: str) -> None:
    """Run all steps using the flow selected in the configuration."""
    from hybridflow.observe.progress import Progress
    from hybridflow.trainer.run import FlowRun, Trainer

    with Progress(0, "", enabled=False) as progress:
        trainer = cast(Trainer, _trainer(workers, timeline))
        await FlowRun(trainer, progress, STEPS).follow()
    assert workers.updates == STEPS
    workers.updates = 0


async def _by_hand(workers: _Workers) -> None:
    """Make the same calls as the flow, directly and in sequence."""
    from hybridflow.workers.model_role import ModelWorker
    from hybridflow.workers.policy import PolicyWorker

    critic = workers.config.algorithm.adv_estimator == "gae"
    for step in range(1, STEPS + 1):
        batch = await workers.take(step)
        reference = await workers.compute(PolicyWorker.compute_ref_log_probs, batch)
        batch = batch.union(reference)
        if critic:
            values = await workers.compute(ModelWorker.compute_values, batch)
            batch = batch.union(values)
        batch = workers.advantages.add(batch)
        if critic:
            await workers.update(ModelWorker.update_critic, batch)
        await workers.update_and_score(batch, step)
        await workers.sync(step)
    assert workers.updates == STEPS
    workers.updates = 0


@dataclass
class _Workers:
    """Roles, engines and samples that immediately return precomputed values."""

    config: RunConfig
    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from hybridflow.batch import DataProto, Jagged
        from hybridflow.trainer.advantages import Advantages

        rows = PROMPTS * SAMPLES
        lengths = np.full(rows, TOKENS)
        ids = Jagged.from_lengths(np.zeros(rows * TOKENS, np.int64), lengths)
        ones = Jagged.from_lengths(np.ones(rows * TOKENS, np.float32), lengths)
        self.ones = ones
        self.advantages = Advantages(self.config)
        self.samples = DataProto.from_columns(
            {
                "uid": np.repeat(np.arange(PROMPTS), SAMPLES),
                "prompt_ids": Jagged.from_rows([np.arange(2)] * rows, np.int64),
                "response_ids": ids,
                "response_mask": Jagged(ones.values.astype(np.bool_), ids.offsets),
                "rollout_log_probs": ones,
                "scores": (np.arange(rows) % 2).astype(np.float32),
            }
        )

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """Return the same samples in every step."""
        return self.samples

    def keep(self, batch: DataProto) -> DataProto:
        """Return the batch unchanged."""
        return batch

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Return precomputed columns in place of those that the method would compute."""
        from hybridflow.batch import DataProto
        from hybridflow.dispatch import method_spec

        names = method_spec(method).writes
        return DataProto.from_columns(dict.fromkeys(names, self.ones))

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int = 0
    ) -> Sequence[Any]:
        """Return immediately, without updating the critic."""
        return []

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[Sequence[Any], DataProto]:
        """Count an update of the policy. Returns the batch itself in place of its log-probs."""
        self.updates += 1
        return [], batch

    async def sync(self, version: int) -> Any:
        """Return the report of an empty weight sync."""
        from hybridflow.rollout.protocols import SyncReport

        return SyncReport(version, 0.0, 0, {})

    async def load_metrics(self) -> dict[str, float]:
        """Return an empty mapping, because there is no engine."""
        return {}


def _trainer(workers: _Workers, timeline: str) -> SimpleNamespace:
    """Return a trainer reduced to the parts that a flow uses, with a real queue and timeline.

    Records and checkpoints are omitted, because they are the same for every algorithm.
    """
    from hybridflow.config import derived
    from hybridflow.observe.timeline import Timeline
    from hybridflow.trainer.devices import Devices

    config = workers.config
    times = Timeline(timeline)
    others = [role for role in derived.roles_in_use(config) if role != "actor"]
    return SimpleNamespace(
        config=config,
        session=SimpleNamespace(
            timeline=times,
            timed=_nothing,
            controlled=_nothing,
            is_due=lambda every, step: False,
            stop_asked=False,
            stop_if_asked=_later,
            store=SimpleNamespace(check=_later),
        ),
        policy=workers,
        others=dict.fromkeys(others, workers),
        learners={},
        engines=workers,
        samples=workers,
        advantages=workers.advantages,
        devices=Devices(lambda role: derived.pool_of(config, role), times),
        phases=SimpleNamespace(training=_memory, sync=_memory),
        records=SimpleNamespace(
            check_log_probs=lambda batch, step, name: None,
            trained=_later,
            validate=_later,
        ),
        state={},
        step=0,
        last=STEPS,
        left_out=set(),
        save=_later,
    )


@contextmanager
def _nothing(*given: Any) -> Iterator[None]:
    yield


@asynccontextmanager
async def _memory() -> AsyncIterator[None]:
    yield


async def _later(*given: Any) -> None:
    """Do nothing."""
