"""Both sides of `flows`: a flow, and the same calls by hand, with roles that compute nothing."""

from __future__ import annotations

from typing import cast

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.bench.rounds import Call
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.observe.progress import Progress
from hybridflow.observe.timeline import Timeline
from hybridflow.single_controller import block_on
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.flow_check import Invented
from hybridflow.trainer.run import FlowRun, Trainer
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker


def sides(config: RunConfig, timeline: str) -> dict[str, Call]:
    """Return the calls to time: all steps by the configuration's flow, and by hand."""
    return {
        "flow": lambda: block_on(_followed(_trainer(config, timeline))),
        "hand": lambda: block_on(_by_hand(_trainer(config, timeline))),
    }


async def _followed(trainer: Trainer) -> None:
    with Progress(0, "", enabled=False) as progress:
        await FlowRun(trainer, progress, trainer.last).follow()


async def _by_hand(trainer: Trainer) -> None:
    """Make the same calls as the flow, directly and in sequence."""
    critic = trainer.others.get("critic")
    for step in range(1, trainer.last + 1):
        batch = await trainer.samples.take(step, greedy=False)
        method = PolicyWorker.compute_ref_log_probs
        batch = batch.union(await trainer.policy.compute(method, batch))
        if critic:
            values = await critic.compute(ModelWorker.compute_values, batch)
            batch = batch.union(values)
        batch = trainer.advantages.add(batch)
        if critic:
            await critic.update(ModelWorker.update_critic, batch)
        await trainer.policy.update_and_score(batch, step)
        await trainer.engines.sync(step)


def _trainer(config: RunConfig, timeline: str) -> Trainer:
    """Return a trainer that takes the same samples in every step. Its queue and timeline are real.

    Records and checkpoints are omitted, because they are the same for every algorithm.
    """
    invented = Invented(config)
    answers = invented.answers(config.data.train_batch_size, config.rollout.n)
    scores = (np.arange(len(answers)) % 2).astype(np.float32)
    samples = answers.with_columns(scores=scores)

    async def take(step: int, greedy: bool) -> DataProto:
        return samples

    times = Timeline(timeline)
    trainer = invented.trainer()
    trainer.session.timeline = times
    trainer.devices = Devices(lambda role: derived.pool_of(config, role), times)
    trainer.samples.take = take
    trainer.last = config.trainer.total_steps
    return cast(Trainer, trainer)
