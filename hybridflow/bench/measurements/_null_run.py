"""Both sides of `flows`: a run whose workers return immediately, and the same calls by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.bench.rounds import Call
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.dispatch import method_spec
from hybridflow.observe.progress import Progress
from hybridflow.observe.timeline import Timeline
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.flow_check import Invented
from hybridflow.trainer.run import FlowRun, Trainer
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker

# per response; few, so that advantages, which both sides compute, take negligible time
TOKENS = 8


def sides(config: RunConfig, timeline: str) -> dict[str, Call]:
    """Return the calls to time: all steps by the configuration's flow, and by hand."""
    workers = _Workers(config)
    return {
        "flow": lambda: block_on(_followed(workers, timeline)),
        "hand": lambda: block_on(_by_hand(workers)),
    }


async def _followed(workers: _Workers, timeline: str) -> None:
    with Progress(0, "", enabled=False) as progress:
        trainer = _trainer(workers, timeline)
        await FlowRun(trainer, progress, workers.steps).follow()
    workers.finish()


async def _by_hand(workers: _Workers) -> None:
    """Make the same calls as the flow, directly and in sequence."""
    critic = workers.config.algorithm.adv_estimator == "gae"
    for step in range(1, workers.steps + 1):
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
    workers.finish()


class _Workers:
    """Roles and samples that immediately return precomputed values."""

    def __init__(self, config: RunConfig) -> None:
        prompts = config.data.train_batch_size
        rows = prompts * config.rollout.n
        lengths = np.full(rows, TOKENS)
        ids = Jagged.from_lengths(np.zeros(rows * TOKENS, np.int64), lengths)
        ones = Jagged.from_lengths(np.ones(rows * TOKENS, np.float32), lengths)
        self.config = config
        self.steps = config.trainer.total_steps
        self.updates = 0
        self.ones = ones
        self.advantages = Advantages(config)
        self.samples = DataProto.from_columns(
            {
                "uid": np.repeat(np.arange(prompts), config.rollout.n),
                "prompt_ids": Jagged.from_rows([np.arange(2)] * rows, np.int64),
                "response_ids": ids,
                "response_mask": Jagged(ones.values.astype(np.bool_), ids.offsets),
                "rollout_log_probs": ones,
                "scores": (np.arange(rows) % 2).astype(np.float32),
            }
        )

    def finish(self) -> None:
        """Check that each step has updated the policy once."""
        assert self.updates == self.steps
        self.updates = 0

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """Return the same samples in every step."""
        return self.samples

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Return precomputed columns in place of those that the method would compute."""
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


def _trainer(workers: _Workers, timeline: str) -> Trainer:
    """Return a trainer whose queue and timeline are real.

    Records and checkpoints are omitted, because they are the same for every algorithm.
    """
    config = workers.config
    times = Timeline(timeline)
    trainer = Invented(config).trainer()
    trainer.session.timeline = times
    trainer.devices = Devices(lambda role: derived.pool_of(config, role), times)
    trainer.policy = workers
    trainer.others = dict.fromkeys(trainer.others, workers)
    trainer.samples.take = workers.take
    trainer.advantages = workers.advantages
    trainer.last = workers.steps
    return cast(Trainer, trainer)
